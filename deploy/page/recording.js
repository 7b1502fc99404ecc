// A stream of canvases, kept frame by frame. Equal slots are one object, so that a long recording stays small.

/** One completion as it was denoised. */
export class Recording {
  /** `{step, numSteps, slots}` each; a slot is `{text, masked, step, confidence}`. */
  frames = [];

  get last() {
    return this.frames.at(-1) ?? null;
  }

  /** Add what one chunk says of the canvas; a chunk that only says how it ended shows nothing new. */
  add({ step, num_steps: numSteps, slots }) {
    const before = this.last?.slots ?? [];
    const shared = slots.map((slot, index) => (isSame(slot, before[index]) ? before[index] : slot));
    const isNew = step !== this.last?.step || shared.length !== before.length || shared.some((slot, index) => slot !== before[index]);
    if (!isNew) {
      return;
    }
    this.frames.push({ step, numSteps: numSteps ?? null, slots: shared });
  }

  /** The frame at a position; beyond the end it is the last. */
  at(position) {
    return this.frames[Math.min(position, this.frames.length - 1)] ?? null;
  }

  /** The steps that the colour scale spans. */
  get numSteps() {
    return Math.max(1, this.last?.numSteps ?? 0, this.last?.step ?? 0);
  }

  get text() {
    return (this.last?.slots ?? []).map((slot) => slot.text).join("");
  }
}

function isSame(slot, other) {
  return (
    other !== undefined &&
    slot.masked === other.masked &&
    slot.text === other.text &&
    slot.step === other.step &&
    slot.confidence === other.confidence
  );
}
