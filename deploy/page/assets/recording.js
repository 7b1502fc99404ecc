// A stream of canvases, kept frame by frame. Equal slots are one object, so that a long recording stays small.

/** One completion as it was denoised. */
export class Recording {
  /** `{step, numSteps, slots}` each; a slot is `{text, masked, step, confidence}`, and `lost` where it is masked again: the text that it held last. */
  frames = [];
  /** Of each slot of the last frame, once the text is whole: why it is no part of the text, or "". */
  notes = [];
  #text = null;

  get last() {
    return this.frames.at(-1) ?? null;
  }

  /** Add what one chunk says of the canvas; a chunk that only says how it ended shows nothing new. */
  add({ step, num_steps: numSteps, slots }) {
    const before = this.last?.slots ?? [];
    const shared = slots.map((each, index) => {
      const slot = withLoss(each, before[index]);
      return isSame(slot, before[index]) ? before[index] : slot;
    });
    const isNew = step !== this.last?.step || shared.length !== before.length || shared.some((slot, index) => slot !== before[index]);
    if (!isNew) {
      return;
    }
    this.frames.push({ step, numSteps: numSteps ?? null, slots: shared });
  }

  /** The text is whole: what the service says it is, which the slots alone do not tell. */
  end(text) {
    this.#text = text;
    this.notes = notesOf(this.last?.slots ?? [], text);
  }

  /** The frame at a position; beyond the end it is the last. */
  at(position) {
    return this.frames[Math.min(position, this.frames.length - 1)] ?? null;
  }

  /** The steps that the colour scale spans. */
  get numSteps() {
    return Math.max(1, this.last?.numSteps ?? 0, this.last?.step ?? 0);
  }

  /** The least and the greatest confidence of its last frame; null without any. */
  get confidences() {
    const known = (this.last?.slots ?? []).map((slot) => slot.confidence).filter(Number.isFinite);
    return known.length > 0 ? [Math.min(...known), Math.max(...known)] : null;
  }

  /** The text of the answer; until it is whole, what has come of it. */
  get text() {
    return this.#text ?? (this.last?.slots ?? []).map((slot) => slot.text).join("");
  }
}

/** Special tokens are not in a text, and neither is what follows its end: an end of text, a stop, its last token. */
function notesOf(slots, text) {
  let left = text;
  let isOver = false;
  return slots.map(({ text: own }) => {
    // A slot without a text of its own after the last character is the rest of that character.
    isOver ||= left === "" && own !== "";
    if (isOver) {
      return "after the text";
    }
    if (!left.startsWith(own) && !own.startsWith(left)) {
      return "not part of the text";
    }
    left = left.slice(own.length);
    return "";
  });
}

/** A policy that renoises takes tokens back: such a slot is not as one that never held any, wherever a replay begins. */
function withLoss(slot, before) {
  const lost = before?.masked === false ? before.text : before?.lost;
  return slot.masked && lost !== undefined ? { ...slot, lost } : slot;
}

function isSame(slot, other) {
  return (
    other !== undefined &&
    slot.masked === other.masked &&
    slot.lost === other.lost &&
    slot.text === other.text &&
    slot.step === other.step &&
    slot.confidence === other.confidence
  );
}
