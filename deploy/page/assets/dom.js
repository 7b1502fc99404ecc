// Elements and hostile text. Text of the model reaches the document through `textContent` alone.

/** An element with attributes and children; strings become text, null is left out. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) {
      element.setAttribute(key, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Controls, overrides of the text's direction, and what is invisible; newline and tab stay, and so do the joiners, which
// emoji and many scripts need.
const STEERING = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

/** The text with what could steer its display made visible, as `d1 status` does. */
export function visible(text) {
  return String(text).replace(STEERING, (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** At most `limit` characters of the visible text, and how many were left out. */
export function shortened(text, limit) {
  const whole = String(text);
  if (whole.length <= limit) {
    return visible(whole);
  }
  return `${visible(whole.slice(0, limit))} … ${(whole.length - limit).toLocaleString("en")} more characters`;
}

/** Set a text only where it has changed, so that a selection in it survives a poll. */
export function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}
