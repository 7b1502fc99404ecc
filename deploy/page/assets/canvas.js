// One completion's canvas: a slot for each token, masked or committed, coloured by when or by how surely.

import { make, shortened, visible } from "./dom.js";
import { percent } from "./numbers.js";

const MAX_SLOT_CHARS = 20_000;
const MAX_TIP_CHARS = 60;
// What a cell has room for, in letters that become smaller.
const SHORT_CHARS = 5;
const WORD_CHARS = 7;
// A token that is no text in most vocabularies; which ones are not the page hears when the text is whole.
const SPECIAL = /^<\|[^|]*\|>$/;
// Shades of viridis (see page.css): even in lightness and told apart by colour-blind readers. The tip has the numbers too.
const NUM_SHADES = 10;

/** A listbox of slots: arrow keys walk through it, and pointer or focus shows a slot's step and confidence. */
export class CanvasView {
  #frame = null;
  #recording = null;
  #colourBy = "step";
  #range = [0, 1];
  #numSteps = 1;
  #notes = [];
  #spans = [];
  #active = 0;
  #id;
  #tip;

  /** `tip` is the one element that shows what is known of a slot. */
  constructor(id, name, tip) {
    this.#id = id;
    this.#tip = tip;
    this.element = make("div", { class: "canvas", id, role: "listbox", tabindex: "0", "aria-label": name, "aria-orientation": "horizontal", dir: "ltr" });
    this.element.addEventListener("keydown", (event) => this.#walk(event));
    this.element.addEventListener("focus", () => this.element.matches(":focus-visible") && this.#activate(this.#active));
    this.element.addEventListener("blur", () => this.#leave());
    this.element.addEventListener("pointerover", (event) => this.#point(event));
    this.element.addEventListener("pointerdown", (event) => this.#point(event));
    this.element.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.#leave());
    this.element.addEventListener("scroll", () => this.#leave());
  }

  set colourBy(value) {
    this.#colourBy = value;
    if (this.#frame !== null) {
      this.#draw(this.#frame, true);
    }
  }

  /** The confidences that the colours span. */
  set range(value) {
    if (value.join() !== this.#range.join()) {
      this.#range = value;
      this.colourBy = this.#colourBy;
    }
  }

  /** Show the frame of a recording at a position. */
  show(recording, position) {
    const frame = recording.at(position);
    const isAll = recording !== this.#recording || recording.numSteps !== this.#numSteps || recording.notes !== this.#notes;
    this.#recording = recording;
    this.#numSteps = recording.numSteps;
    this.#notes = recording.notes;
    if (frame !== null && (frame !== this.#frame || isAll)) {
      this.#draw(frame, isAll);
    }
  }

  #draw(frame, isAll) {
    const before = this.#frame?.slots ?? [];
    this.#frame = frame;
    while (this.#spans.length > frame.slots.length) {
      this.#spans.pop().remove();
    }
    while (this.#spans.length < frame.slots.length) {
      const span = make("span", { id: `${this.#id}-${this.#spans.length}`, role: "option", "aria-selected": "false" });
      span.dataset.slot = this.#spans.length;
      this.#spans.push(span);
      this.element.append(span);
    }
    frame.slots.forEach((slot, index) => {
      if (isAll || slot !== before[index]) {
        this.#paint(this.#spans[index], slot, before[index]);
      }
    });
    this.#active = Math.min(this.#active, Math.max(0, frame.slots.length - 1));
    this.#refreshTip();
  }

  #paint(span, slot, before) {
    const isNew = before !== undefined && !slot.masked && (before.masked || before.text !== slot.text);
    const isOutside = this.#notes[span.dataset.slot] || SPECIAL.test(slot.text);
    const marks = [slot.text === "" ? " empty" : "", sizeOf(slot.text), isOutside ? " outside" : "", isNew ? " new" : ""].join("");
    span.className = slot.masked ? `slot masked${isLost(slot) ? " lost" : ""}` : `slot ${this.#shade(slot)}${marks}`;
    span.textContent = slot.masked ? "" : shortened(slot.text, MAX_SLOT_CHARS).replaceAll("\n", "↵");
    span.setAttribute("aria-label", this.#describe(Number(span.dataset.slot)));
  }

  #shade(slot) {
    const share = this.#colourBy === "step" ? slot.step / Math.max(1, this.#numSteps - 1) : shareOf(slot.confidence, this.#range);
    return typeof share === "number" ? shadeOf(share) : "shade-none";
  }

  #describe(index) {
    const slot = this.#frame.slots[index];
    if (slot.masked) {
      return `Slot ${index + 1}: ${inWords(slot)}`;
    }
    const facts = [this.#notes[index], `step ${slot.step + 1}`, `confidence ${percent(slot.confidence)}`];
    return `Slot ${index + 1}: ${[inWords(slot), ...facts].filter(Boolean).join(", ")}`;
  }

  #walk(event) {
    const last = this.#spans.length - 1;
    const targets = {
      ArrowRight: this.#active + 1,
      ArrowLeft: this.#active - 1,
      ArrowDown: this.#below(1),
      ArrowUp: this.#below(-1),
      Home: 0,
      End: last,
    };
    if (event.key === "Escape") {
      this.#leave();
    } else if (event.key in targets && last >= 0 && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.#activate(Math.max(0, Math.min(last, targets[event.key])));
    }
  }

  /** The nearest slot on the next line, up (-1) or down (1). */
  #below(direction) {
    const from = this.#spans[this.#active]?.getBoundingClientRect();
    if (!from) {
      return 0;
    }
    let best = this.#active;
    let line = null;
    let distance = Infinity;
    for (let index = this.#active + direction; index >= 0 && index < this.#spans.length; index += direction) {
      const place = this.#spans[index].getBoundingClientRect();
      const isOther = direction > 0 ? place.top >= from.bottom - 2 : place.bottom <= from.top + 2;
      if (!isOther) {
        continue;
      }
      line ??= place.top;
      if (Math.abs(place.top - line) > from.height / 2) {
        break;
      }
      if (Math.abs(place.left - from.left) < distance) {
        distance = Math.abs(place.left - from.left);
        best = index;
      }
    }
    return best;
  }

  #activate(index) {
    this.#clearActive();
    const span = this.#spans[index];
    if (!span) {
      return;
    }
    this.#active = index;
    span.setAttribute("aria-selected", "true");
    span.classList.add("active");
    this.element.setAttribute("aria-activedescendant", span.id);
    span.scrollIntoView({ block: "nearest" });
    this.#showTip(span);
  }

  #point(event) {
    const span = event.target.closest(".slot");
    if (span) {
      this.#clearActive();
      this.#active = Number(span.dataset.slot);
      this.#showTip(span);
    }
  }

  #leave() {
    this.#clearActive();
    this.#tip.hide(this);
  }

  #clearActive() {
    for (const span of this.element.querySelectorAll(".active")) {
      span.classList.remove("active");
      span.setAttribute("aria-selected", "false");
    }
    this.element.removeAttribute("aria-activedescendant");
  }

  #refreshTip() {
    if (this.#tip.owner === this && this.#spans[this.#active]) {
      this.#showTip(this.#spans[this.#active]);
    }
  }

  #showTip(span) {
    const index = Number(span.dataset.slot);
    const slot = this.#frame.slots[index];
    const facts = slot.masked ? [] : [["step", `${slot.step + 1} of ${this.#numSteps}`], ["confidence", percent(slot.confidence)]];
    const note = !slot.masked && this.#notes[index] ? [["it is", this.#notes[index]]] : [];
    this.#tip.show(this, span, inWords(slot), [["slot", `${index + 1} of ${this.#spans.length}`], ...facts, ...note]);
  }
}

/** Where a confidence lies between the least and the greatest; the greatest where they are one. */
function shareOf(confidence, [least, greatest]) {
  if (typeof confidence !== "number") {
    return null;
  }
  return greatest > least ? (confidence - least) / (greatest - least) : 1;
}

/** A slot's text on one line. */
function inWords(slot) {
  if (slot.masked) {
    return isLost(slot) ? `masked again${slot.lost === "" ? "" : `, it was ${onOneLine(slot.lost)}`}` : "masked";
  }
  return slot.text === "" ? "rest of the character before" : onOneLine(slot.text);
}

/** The class of a text that needs smaller letters. A space before a word takes no room. */
function sizeOf(text) {
  const chars = text.trimStart().length;
  return chars > WORD_CHARS ? " long" : chars > SHORT_CHARS ? " word" : "";
}

/** Whether it held a token that was taken back. */
function isLost(slot) {
  return slot.masked && slot.lost !== undefined;
}

function onOneLine(text) {
  return shortened(text, MAX_TIP_CHARS).replaceAll("\n", "↵");
}

/** What is known of the slot under the pointer or the focus. Screen readers have it as the slot's name. */
export class Tip {
  owner = null;

  constructor() {
    this.element = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
    document.body.append(this.element);
    window.addEventListener("scroll", () => this.hide(this.owner), { passive: true });
  }

  show(owner, anchor, text, facts) {
    this.owner = owner;
    this.element.replaceChildren(
      make("span", { class: "tip-text" }, visible(text)),
      ...facts.map(([name, value]) => make("span", {}, `${name} `, make("b", {}, value))),
    );
    this.element.hidden = false;
    const place = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.max(8, Math.min(place.left, document.documentElement.clientWidth - width - 8));
    const top = place.top - height - 8 < 0 ? place.bottom + 8 : place.top - height - 8;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${top}px`;
  }

  hide(owner) {
    if (this.owner === owner) {
      this.owner = null;
      this.element.hidden = true;
    }
  }
}

/** The class of a share from 0 to 1. */
function shadeOf(share) {
  return `shade-${Math.min(NUM_SHADES - 1, Math.floor(Math.max(0, share) * NUM_SHADES))}`;
}
