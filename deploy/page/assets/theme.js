// Which theme: what the reader chose here before, or else what the system asks for. A classic script, not a module,
// because it has to run before the first paint.
"use strict";

(() => {
  const STORED = "d1.theme";
  const root = document.documentElement;
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");

  const read = () => {
    try {
      return localStorage.getItem(STORED);
    } catch {
      return null; // Storage is switched off: the system's theme it is.
    }
  };
  const write = (theme) => {
    try {
      localStorage.setItem(STORED, theme);
    } catch {
      // It then holds until the page is closed.
    }
  };
  const current = () => root.dataset.theme ?? (systemDark.matches ? "dark" : "light");
  const announce = () => window.dispatchEvent(new Event("themechange"));

  const stored = read();
  if (stored === "dark" || stored === "light") {
    root.dataset.theme = stored;
  }
  systemDark.addEventListener("change", announce);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-toggle");
    const label = () => {
      const other = current() === "dark" ? "Light" : "Dark";
      button.textContent = other;
      button.setAttribute("aria-label", `${other} theme`);
    };
    button.addEventListener("click", () => {
      root.dataset.theme = current() === "dark" ? "light" : "dark";
      write(root.dataset.theme);
      announce();
    });
    window.addEventListener("themechange", label);
    label();
  });
})();
