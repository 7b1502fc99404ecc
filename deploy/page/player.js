// Which of the recorded frames is shown, and how that moves. It knows no document.

const REPLAY_MS = 5000;
const SLOWEST_MS = 250;
const FASTEST_MS = 40;

/** A position among frames that may still be coming. */
export class Player {
  position = 0;
  length = 0;
  isPlaying = false;
  #onChange;
  #timer = null;

  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** Forget the frames; show new ones as they come. */
  reset() {
    this.#stopTimer();
    this.position = 0;
    this.length = 0;
    this.isPlaying = true;
    this.#onChange();
  }

  /** There are now so many frames. Who plays at the end goes along; who paused, or replays, stays. */
  grow(length) {
    const wasAtEnd = this.position >= this.length - 1;
    this.length = Math.max(this.length, length);
    if (this.isPlaying && wasAtEnd && this.#timer === null) {
      this.position = Math.max(0, this.length - 1);
    }
    this.#onChange();
  }

  /** No more frames will come. */
  end() {
    if (this.#timer === null) {
      this.isPlaying = false;
    }
    this.#onChange();
  }

  pause() {
    this.#stopTimer();
    this.isPlaying = false;
    this.#onChange();
  }

  /** Go on from here; from the start where all has been seen. `isLive` says whether more may come. */
  play(isLive) {
    this.#stopTimer();
    this.isPlaying = true;
    if (this.position >= this.length - 1 && !isLive()) {
      this.position = 0;
    }
    const everyMs = Math.min(SLOWEST_MS, Math.max(FASTEST_MS, REPLAY_MS / Math.max(1, this.length)));
    this.#timer = setInterval(() => this.#tick(isLive), everyMs);
    this.#onChange();
  }

  /** Show one frame, and stay there. */
  seek(position) {
    this.#stopTimer();
    this.isPlaying = false;
    this.position = Math.max(0, Math.min(position, this.length - 1));
    this.#onChange();
  }

  #tick(isLive) {
    if (this.position < this.length - 1) {
      this.position += 1;
    }
    if (this.position >= this.length - 1) {
      this.#stopTimer();
      this.isPlaying = isLive();
    }
    this.#onChange();
  }

  #stopTimer() {
    clearInterval(this.#timer);
    this.#timer = null;
  }
}
