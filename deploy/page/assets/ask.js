// The view that asks: a prompt and its options, one stream or two, and the recording that they leave.

import { drawnAnswer } from "./answer.js";
import { ApiError, get, stream } from "./api.js";
import { CanvasView, Tip } from "./canvas.js";
import { byId, make, setText, shortened, visible } from "./dom.js";
import { counted, duration, number, percent } from "./numbers.js";
import { Player } from "./player.js";
import { Recording } from "./recording.js";

const BASE = "base";
const NUMBERS = ["temperature", "max_tokens", "seed"];
const DIFFUSION_NUMBERS = ["steps", "block_length", "threshold"];
const MAX_SPOKEN_CHARS = 2000;
const MAX_TEXT_CHARS = 20_000;
const IS_NARROW = "(max-width: 640px)";

/** One column: a model's answer, its canvas and what it cost. */
class Column {
  recording = new Recording();
  isLive = true;

  constructor(index, model, prompt, tip) {
    this.model = model;
    this.prompt = prompt;
    this.view = new CanvasView(`canvas-${index}`, `Canvas of ${model}`, tip);
    this.title = make("h3", { id: `column-${index}` }, visible(model));
    this.state = make("p", { class: "state" }, "waiting");
    this.error = make("p", { class: "error", role: "alert" });
    this.answer = make("div", { class: "answer" });
    this.text = make("p", { class: "text" });
    this.usage = make("p", { class: "usage" });
    this.copy = make("button", { type: "button", class: "quiet", hidden: true }, "Copy text");
    this.copy.addEventListener("click", () => this.#copy());
    this.element = make(
      "article",
      { class: "column", "aria-labelledby": `column-${index}` },
      make("header", {}, this.title, this.state),
      this.answer,
      this.view.element,
      this.text,
      this.error,
      make("footer", {}, this.usage, this.copy),
    );
    this.began = performance.now();
  }

  /** Take one chunk of the stream. */
  take(chunk) {
    if (typeof chunk.policy_version === "number") {
      setText(this.title, `${visible(this.model)} · version ${chunk.policy_version}`);
    }
    const choice = chunk.choices?.[0];
    if (Array.isArray(choice?.diffusion?.slots)) {
      this.recording.add(choice.diffusion);
    }
    if (choice?.finish_reason) {
      this.cause = choice.finish_reason;
      this.recording.end(String(choice.text ?? choice.delta?.content ?? ""));
    }
    if (chunk.usage) {
      this.#showUsage(chunk.usage);
    }
  }

  /** Show the frame at a position; the text as it is read once all of it has been seen. */
  show(position, range) {
    this.view.range = range;
    this.view.show(this.recording, position);
    const frame = this.recording.at(position);
    if (frame !== this.shown) {
      this.shown = frame;
      const drawn = drawnAnswer(this.prompt, frame);
      this.answer.replaceChildren(...(drawn === null ? [] : [drawn]));
    }
    const isWhole = !this.isLive && position >= this.recording.frames.length - 1;
    setText(this.text, isWhole ? shortened(this.recording.text, MAX_TEXT_CHARS) : "");
  }

  finish() {
    this.#end(this.cause === "length" ? "complete, all slots used" : "complete");
  }

  stop() {
    this.#end("stopped");
  }

  fail(error) {
    this.#end(this.recording.last === null && error.status ? "not answered" : "broken");
    const partial = this.recording.last === null ? "" : " What you see is not the whole answer.";
    this.error.textContent = `${visible(error.message)}${partial}`;
  }

  #end(state) {
    this.isLive = false;
    const seconds = (performance.now() - this.began) / 1000;
    setText(this.state, this.recording.last === null ? state : `${state} · ${duration(seconds)}`);
    this.copy.hidden = this.recording.text === "";
  }

  #showUsage({ completion_tokens: tokens, diffusion = {} }) {
    const parts = [
      Number.isFinite(diffusion.num_forwards) ? counted(diffusion.num_forwards, "forward") : null,
      Number.isFinite(tokens) ? counted(tokens, "token") : null,
      Number.isFinite(diffusion.tokens_per_forward) ? `${number(diffusion.tokens_per_forward)} tokens per forward` : null,
    ];
    this.usage.textContent = parts.filter((part) => part !== null).join(" · ");
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(this.recording.text);
      this.copy.textContent = "Copied";
    } catch {
      this.copy.textContent = "The browser does not allow it";
    }
    setTimeout(() => setText(this.copy, "Copy text"), 2000);
  }
}

/** The view as a whole. */
export class AskView {
  #columns = [];
  #abort = null;
  #tip = new Tip();
  #player = new Player(() => this.#schedule());
  #isScheduled = false;
  #isToScroll = false;

  constructor() {
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        byId("ask-form").requestSubmit();
      }
    });
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("back").addEventListener("click", () => this.#player.seek(this.#player.position - 1));
    byId("forward").addEventListener("click", () => this.#player.seek(this.#player.position + 1));
    byId("position").addEventListener("input", (event) => this.#player.seek(event.target.valueAsNumber));
    byId("play").addEventListener("click", () => (this.#player.isPlaying ? this.#player.pause() : this.#player.play(() => this.#isLive)));
    for (const radio of document.getElementsByName("colour")) {
      radio.addEventListener("change", () => this.#recolour());
    }
  }

  get #isLive() {
    return this.#columns.some((column) => column.isLive);
  }

  get #colourBy() {
    return document.querySelector("input[name=colour]:checked").value;
  }

  /** Fill the picker with what the service offers, and keep the choice. */
  async loadModels() {
    const { data = [] } = await get("v1/models");
    // `last` is what the command line calls `policy`.
    const names = data.map((model) => model.id).filter((id) => typeof id === "string" && id !== "last");
    const picker = byId("model");
    const chosen = picker.value;
    const ordered = [...new Set(names)].sort((one, other) => rank(one) - rank(other) || other.localeCompare(one, "en", { numeric: true }));
    if (ordered.join("\n") !== [...picker.options].map((option) => option.value).join("\n")) {
      picker.replaceChildren(...ordered.map((name) => make("option", { value: name }, labelOf(name))));
      picker.value = ordered.includes(chosen) ? chosen : (ordered[0] ?? "");
    }
    byId("compare").disabled = !ordered.includes(BASE);
  }

  /** Ask a problem that was chosen. */
  askFor(prompt) {
    byId("prompt").value = prompt;
    byId("format").value = "chat";
    this.#ask();
  }

  async #ask() {
    const prompt = byId("prompt").value;
    const problem = this.#problem(prompt);
    byId("ask-error").textContent = problem ?? "";
    if (problem !== null) {
      return;
    }
    this.#abort?.abort();
    const abort = new AbortController();
    this.#abort = abort;
    const model = byId("model").value;
    const models = byId("compare").checked && model !== BASE ? [BASE, model] : [model];
    const columns = models.map((name, index) => new Column(index, name, prompt, this.#tip));
    this.#columns = columns;
    this.#tip.hide(this.#tip.owner);
    byId("columns").replaceChildren(...columns.map((column) => column.element));
    byId("answer").hidden = false;
    byId("stop").hidden = false;
    byId("announcement").textContent = "";
    this.#recolour();
    this.#player.reset();
    this.#isToScroll = matchMedia(IS_NARROW).matches;
    await Promise.all(columns.map((column) => this.#follow(column, requestOf(column.model, prompt), abort.signal)));
    if (this.#abort === abort) {
      byId("stop").hidden = true;
      this.#player.end();
      byId("announcement").textContent = columns.map(spoken).join(" ");
    }
  }

  #problem(prompt) {
    const bad = document.querySelector("#options input:invalid");
    if (bad !== null) {
      byId("options").open = true;
      bad.focus();
      return `${bad.labels[0].textContent}: ${bad.validationMessage}`;
    }
    if (prompt.trim() === "") {
      byId("prompt").focus();
      return "The prompt is empty.";
    }
    return null;
  }

  async #follow(column, { path, body }, signal) {
    try {
      for await (const { data } of stream(path, { body, signal })) {
        if (data === "[DONE]") {
          column.finish();
          return;
        }
        const chunk = parse(data);
        if (chunk.error) {
          throw new ApiError(`The service ended the stream. ${String(chunk.error.message ?? "")}`);
        }
        column.take(chunk);
        if (this.#columns.includes(column)) {
          setText(column.state, "denoising");
          this.#player.grow(Math.max(...this.#columns.map((each) => each.recording.frames.length)));
        }
      }
      throw new ApiError("The stream ended before the answer was complete.");
    } catch (error) {
      if (error.name === "AbortError") {
        column.stop();
      } else {
        column.fail(error);
      }
    } finally {
      this.#schedule();
    }
  }

  #recolour() {
    this.#showScale(this.#range);
    for (const column of this.#columns) {
      column.view.colourBy = this.#colourBy;
    }
  }

  /** The confidences that are there: all of the scale is used. */
  get #range() {
    const known = this.#columns.map((column) => column.recording.confidences).filter((each) => each !== null);
    return known.length > 0 ? [Math.min(...known.map(([least]) => least)), Math.max(...known.map(([, greatest]) => greatest))] : [0, 1];
  }

  #showScale([least, greatest]) {
    const isStep = this.#colourBy === "step";
    setText(byId("scale-low"), isStep ? "first" : percent(least));
    setText(byId("scale-high"), isStep ? "last" : percent(greatest));
  }

  /** Draw once for each picture of the screen, however fast the frames come. */
  #schedule() {
    if (!this.#isScheduled) {
      this.#isScheduled = true;
      requestAnimationFrame(() => {
        this.#isScheduled = false;
        this.#draw();
      });
    }
  }

  #draw() {
    const { position, length, isPlaying } = this.#player;
    const range = this.#range;
    for (const column of this.#columns) {
      column.show(position, range);
    }
    this.#showScale(range);
    if (this.#isToScroll && length > 0) {
      this.#isToScroll = false;
      byId("answer").scrollIntoView({ block: "start" });
    }
    const slider = byId("position");
    // While frames still come the slider's length is what is expected, so that it shows how far the answer is.
    const expected = this.#isLive ? Math.max(0, ...this.#columns.map((column) => column.recording.last?.numSteps ?? 0)) : 0;
    slider.max = String(Math.max(0, length - 1, expected));
    slider.value = String(position);
    slider.disabled = length === 0;
    const frame = this.#columns.map((column) => column.recording.at(position)).find((each) => each !== null);
    const where = frame ? `step ${frame.step}${frame.numSteps === null ? "" : ` of ${frame.numSteps}`}` : "";
    setText(byId("where"), where);
    slider.setAttribute("aria-valuetext", where || "no frame yet");
    byId("play").classList.toggle("is-playing", isPlaying);
    byId("play").setAttribute("aria-label", isPlaying ? "Pause" : "Play");
    byId("back").disabled = position <= 0;
    byId("forward").disabled = position >= length - 1;
    byId("play").disabled = length === 0;
  }
}

/** Where an answer is asked for, and with what. */
function requestOf(model, prompt) {
  const diffusion = { stream: "canvas", ...valuesOf(DIFFUSION_NUMBERS) };
  const options = { model, ...valuesOf(NUMBERS), stream: true, stream_options: { include_usage: true }, diffusion };
  if (byId("format").value === "chat") {
    return { path: "v1/chat/completions", body: { ...options, messages: [{ role: "user", content: prompt }] } };
  }
  return { path: "v1/completions", body: { ...options, prompt } };
}

/** What was filled in; what was left empty is the service's to choose. */
function valuesOf(names) {
  const filled = names.map((name) => [name, byId(name).valueAsNumber]).filter(([, value]) => !Number.isNaN(value));
  return Object.fromEntries(filled);
}

function parse(data) {
  try {
    const chunk = JSON.parse(data);
    return typeof chunk === "object" && chunk !== null ? chunk : {};
  } catch {
    throw new ApiError("The service sent something that this page cannot read.");
  }
}

function spoken(column) {
  const error = column.error.textContent;
  return error === "" ? `${column.model}: ${shortened(column.recording.text, MAX_SPOKEN_CHARS) || "no text"}` : "";
}

function rank(name) {
  return name === "policy" ? 0 : name === BASE ? 1 : name.includes("@") ? 3 : 2;
}

function labelOf(name) {
  const version = /^policy@v0*(\d+)$/.exec(name);
  return name === "policy" ? "policy (newest)" : version ? `version ${version[1]}` : visible(name);
}
