// What a run has come to, as the service tells it part by part.

export class RunHistory {
  /** The newest answer of `GET /v1/run/history`: what is no list is whole in each. */
  newest = null;
  /** What is drawn, in order. */
  rounds = [];
  steps = [];
  evaluations = [];

  /** Take an answer. */
  add(part) {
    for (const list of ["rounds", "steps", "evaluations"]) {
      this[list] = part.is_whole ? part[list] : this[list].concat(part[list]);
    }
    this.newest = part;
  }
}
