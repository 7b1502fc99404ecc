// What no one looks at asks for nothing.

/** Resolves as soon as the page is in sight, and `element` in it. */
export function whenVisible(element = document.body) {
  const isVisible = () => document.visibilityState === "visible" && !element.hidden;
  if (isVisible()) {
    return Promise.resolve();
  }
  return new Promise((resolve) => {
    const check = () => {
      if (isVisible()) {
        document.removeEventListener("visibilitychange", check);
        window.removeEventListener("hashchange", check);
        resolve();
      }
    };
    document.addEventListener("visibilitychange", check);
    window.addEventListener("hashchange", check);
  });
}

/** A signal that is aborted when the page goes out of sight; `release` lets go of it. */
export function untilHidden() {
  const abort = new AbortController();
  const check = () => document.visibilityState === "hidden" && abort.abort();
  document.addEventListener("visibilitychange", check);
  return { signal: abort.signal, abort: () => abort.abort(), release: () => document.removeEventListener("visibilitychange", check) };
}
