// Which of the recorded frames is shown, and how that moves. It knows no document.

const REPLAY_MS = 5000;
const SLOWEST_MS = 250;
const FASTEST_MS = 40;
/** A live frame is seen for so long: a tiny policy is done before its first would be. */
const LIVE_MS = 90;
/** Who is more frames behind than this leaves some out. */
const MAX_BEHIND = 12;

/** A position among frames that may still be coming. */
export class Player {
  position = 0;
  length = 0;
  isPlaying = false;
  #onChange;
  #timer = null;
  #isOver = false;

  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** Forget the frames; show new ones as they come. */
  reset() {
    this.#stopTimer();
    this.position = 0;
    this.length = 0;
    this.isPlaying = true;
    this.#isOver = false;
    this.#onChange();
  }

  /** There are now so many frames. Who plays at the end goes along, frame after frame; who paused, or replays, stays. */
  grow(length) {
    this.length = Math.max(this.length, length);
    if (this.isPlaying && this.#timer === null && this.position < this.length - 1) {
      this.#timer = setInterval(() => this.#catchUp(), LIVE_MS);
    }
    this.#onChange();
  }

  /** No more frames will come; those that were not seen yet still are. */
  end() {
    this.#isOver = true;
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

  #catchUp() {
    const behind = this.length - 1 - this.position;
    this.position += Math.max(1, Math.ceil(behind / MAX_BEHIND));
    if (this.position >= this.length - 1) {
      this.position = this.length - 1;
      this.#stopTimer();
      this.isPlaying = !this.#isOver;
    }
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
