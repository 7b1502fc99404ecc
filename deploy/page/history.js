// A run's events, put in order, as deploy/runs/history.py does it. They arrive a few at a time.

/** What a run has come to. What a resumed run repeated counts once, as it was the last time. */
export class RunHistory {
  name = "";
  phase = "";
  isDone = false;
  seconds = 0;
  numFailures = 0;
  /** The `round` events by round, ascending. */
  rounds = new Map();
  /** The `sft` events by phase, and their held-out losses. */
  steps = new Map();
  sftLosses = new Map();
  planned = new Map();
  evaluations = [];
  #phaseBegins = new Map();
  #phaseEnds = new Map();
  #lastRound = null;
  #isLearnerDown = false;

  /** Take one line of metrics.jsonl. */
  add(event) {
    this.isDone = event.event === "done";
    this.seconds = event.time_s ?? this.seconds;
    switch (event.event) {
      case "run":
        this.name = event.name;
        break;
      case "phase":
        this.#beginPhase(event);
        break;
      case "sft":
        append(this.steps, event.phase, event);
        break;
      case "sft_eval":
        append(this.sftLosses, event.phase, event);
        break;
      case "round":
        this.#addRound(event);
        break;
      case "evaluation":
        this.evaluations.push({ ...event, drawn_s: this.#drawnAt(event) });
        break;
      case "phase_end":
        this.#phaseEnds.set(event.phase, event);
        break;
      case "failure":
        this.#addFailure(event);
        break;
      default:
        break;
    }
  }

  /** A number of every round, in order; null where a round has none. */
  series(key) {
    return [...this.rounds.values()].map((event) => (Number.isFinite(event[key]) ? event[key] : null));
  }

  get lastRound() {
    return this.#lastRound;
  }

  /** What there was of it counts no more, but for the steps before that where a run that was stopped in it goes on. */
  #beginPhase({ phase, num_steps, time_s, from_step = 0 }) {
    this.phase = phase;
    this.#isLearnerDown = false;
    this.planned.set(phase, num_steps);
    if (!this.#phaseBegins.has(phase)) {
      this.#phaseBegins.set(phase, time_s);
    }
    for (const kept of [this.steps, this.sftLosses]) {
      const before = (kept.get(phase) ?? []).filter((event) => event.step <= from_step);
      kept.delete(phase);
      if (from_step > 0 && before.length > 0) {
        kept.set(phase, before);
      }
    }
  }

  /** Where a curve has an evaluation: when it was, but of the control, which begins where RL began, by its own training. */
  #drawnAt({ label, time_s }) {
    const control = this.#phaseEnds.get("control");
    const rlBegan = this.#phaseBegins.get("rl");
    return label === "control" && control && rlBegan !== undefined ? rlBegan + control.seconds : time_s;
  }

  /** A fault counts once, of all that its consequences are recorded as; what needed no other try is none. */
  #addFailure(event) {
    const isRestart = event.what.startsWith("the learner group restarted");
    const isLearner = isRestart || event.what.startsWith("a learner worker failed");
    if (event.attempt !== 0 && !(isLearner && this.#isLearnerDown)) {
      this.numFailures += 1;
    }
    if (isLearner) {
      this.#isLearnerDown = !isRestart;
    }
  }

  /** A run that was resumed from a checkpoint goes through the rounds after it again. */
  #addRound(event) {
    if (this.#lastRound !== null && this.#lastRound.round >= event.round) {
      for (const done of [...this.rounds.keys()].filter((index) => index >= event.round)) {
        this.rounds.delete(done);
      }
    }
    const isLater = (item) => ["round", "validation"].includes(item.label) && item.round > event.round;
    this.evaluations = this.evaluations.filter((item) => !isLater(item));
    this.rounds.set(event.round, event);
    this.#lastRound = event;
  }
}

/** Whether an evaluation is of the run's own policy on held-out problems. */
export function isHeldout(item) {
  return item.label !== "control" && item.label !== "validation";
}

function append(lists, name, item) {
  if (!lists.has(name)) {
    lists.set(name, []);
  }
  lists.get(name).push(item);
}
