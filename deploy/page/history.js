// What a run has come to, as the service tells it part by part.

export class RunHistory {
  name = "";
  phase = null;
  isFinished = false;
  seconds = 0;
  numPlannedRounds = null;
  numFailures = 0;
  numUnreadable = 0;
  /** The newest `round` event, whole. */
  newestRound = null;
  /** What is drawn, in order. */
  rounds = [];
  steps = [];
  evaluations = [];
  /** Where to go on. */
  next = "";

  /** Take an answer of `GET /v1/run/history`. */
  add(part) {
    for (const list of ["rounds", "steps", "evaluations"]) {
      this[list] = part.is_whole ? part[list] : this[list].concat(part[list]);
    }
    this.name = part.name;
    this.phase = part.phase;
    this.isFinished = part.is_finished;
    this.seconds = part.seconds;
    this.numPlannedRounds = part.num_planned_rounds;
    this.numFailures = part.num_failures;
    this.numUnreadable = part.num_unreadable;
    this.newestRound = part.newest_round;
    this.next = part.next;
  }
}
