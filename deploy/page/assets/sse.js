// Server-sent events out of a fetched body (WHATWG HTML, 9.2). EventSource would do this, but it can send no key.

/** Text in any pieces to events: `{event, data, id}`. An event without data is none, a comment is nothing. */
export class EventParser {
  #rest = "";
  #data = [];
  #event = "";
  #id = "";

  /** The events that `text` completes. */
  feed(text) {
    const events = [];
    this.#rest += text;
    for (;;) {
      const end = this.#rest.search(/[\r\n]/);
      // A carriage return at the very end may be half of a pair.
      if (end < 0 || (this.#rest[end] === "\r" && end + 1 === this.#rest.length)) {
        return events;
      }
      const line = this.#rest.slice(0, end);
      this.#rest = this.#rest.slice(this.#rest.startsWith("\r\n", end) ? end + 2 : end + 1);
      const event = line === "" ? this.#dispatch() : this.#field(line);
      if (event) {
        events.push(event);
      }
    }
  }

  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") {
      this.#data.push(value);
    } else if (name === "event") {
      this.#event = value;
    } else if (name === "id") {
      this.#id = value;
    }
    return null;
  }

  #dispatch() {
    const event = { event: this.#event || "message", data: this.#data.join("\n"), id: this.#id };
    const isEmpty = this.#data.length === 0;
    this.#data = [];
    this.#event = "";
    return isEmpty ? null : event;
  }
}

/** The events of a response's body, as they come. Ends when the body ends, well or not. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      yield* parser.feed(value);
    }
  } finally {
    // Whoever leaves the loop early wants no more of it.
    reader.cancel().catch(() => {});
  }
}
