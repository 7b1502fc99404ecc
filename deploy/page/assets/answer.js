// What an answer comes to, drawn: a grid of Sudoku, else what stands between the tags. It follows the canvas.

import { make, shortened, visible } from "./dom.js";

const MASKED = "\u2591";
const SIDE = 4;
const GIVEN = new RegExp(`(?<!\\d)[0-${SIDE}]{${SIDE * SIDE}}(?!\\d)`);
const TAGGED = /<answer>([^]*?)(?:<\/answer>|$)/;
const MAX_SAID_CHARS = 400;

/** The element of a frame's answer; null where there is nothing to draw. */
export function drawnAnswer(prompt, frame) {
  const said = TAGGED.exec(textOf(frame));
  const given = GIVEN.exec(prompt);
  if (given !== null) {
    return sudoku(given[0], said === null ? beforeItsTag(frame) : said[1].trim());
  }
  if (said === null || said[1].trim() === "") {
    return null;
  }
  return make("p", { class: "said" }, shortened(said[1].trim(), MAX_SAID_CHARS));
}

/** A frame's text, with a sign for each masked slot. */
export function textOf(frame) {
  return (frame?.slots ?? []).map((slot) => (slot.masked ? MASKED : slot.text)).join("");
}

/** The cells of an answer that is nothing else, as long as its first tag is masked. */
function beforeItsTag(frame) {
  const slots = frame?.slots ?? [];
  return slots.length === SIDE * SIDE + 2 ? textOf({ slots: slots.slice(1) }) : "";
}

function sudoku(given, filled) {
  const cells = [...given].map((digit, index) => cell(digit, [...filled][index] ?? MASKED));
  const name = cells.map((each) => each.textContent || "empty").join(" ");
  return make("div", { class: "sudoku", role: "img", "aria-label": `Sudoku, row after row: ${name}` }, ...cells);
}

/** A given digit stays what it is; where the policy wrote another, that is struck out. */
function cell(given, written) {
  if (given === "0") {
    return written === MASKED ? make("span", { class: "masked" }) : make("span", {}, visible(written));
  }
  const isChanged = written !== MASKED && written !== given;
  return make("span", { class: isChanged ? "given changed" : "given" }, isChanged ? visible(written) : given);
}
