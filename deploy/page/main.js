// The page: the key, the two views, and who follows what.

import { key, onRefusedKey } from "./api.js";
import { AskView } from "./ask.js";
import { byId, setText } from "./dom.js";
import { PolicyWatch } from "./policy.js";
import { showProblems } from "./problems.js";
import { RunView } from "./run.js";

const VIEWS = { ask: "Ask", run: "Run" };

const ask = new AskView();
const run = new RunView((prompt) => {
  location.hash = "#ask";
  ask.askFor(prompt);
});
const policy = new PolicyWatch(() => ask.loadModels().catch(() => {}));

/** Take the key out of the link that `d1 serve` prints. No server is sent a fragment, and the address bar loses it. */
function takeKeyOfLink() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given !== null) {
    history.replaceState(null, "", location.pathname);
    key.set(given);
  }
  return given !== null;
}

function showView() {
  const chosen = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "ask";
  for (const [name, title] of Object.entries(VIEWS)) {
    const isChosen = name === chosen;
    byId(`view-${name}`).hidden = !isChosen;
    byId(`nav-${name}`).toggleAttribute("aria-current", isChosen);
    if (isChosen) {
      byId(`nav-${name}`).setAttribute("aria-current", "page");
      document.title = `${title} · d1`;
    }
  }
}

function showKeyPanel(isOpen, problem = "") {
  byId("key-panel").hidden = !isOpen;
  byId("key-toggle").setAttribute("aria-expanded", String(isOpen));
  byId("key-forget").hidden = key.get() === "";
  setText(byId("key-error"), problem);
  if (isOpen) {
    byId("key").focus();
  }
}

/** Take up everything that needs a key. A key that the service refuses is reported where it is entered. */
async function begin() {
  try {
    await ask.loadModels();
  } catch (error) {
    if (error.status === 401 || error.status === 403) {
      return;
    }
    // A service that cannot be reached is tried again by those who follow it.
  }
  showKeyPanel(false);
  showProblems((prompt) => ask.askFor(prompt));
  policy.start();
  run.start();
}

onRefusedKey(() => showKeyPanel(true, key.get() === "" ? "" : "The service does not accept this key."));

byId("key-toggle").addEventListener("click", () => showKeyPanel(byId("key-panel").hidden));
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  await begin();
  if (byId("key-panel").hidden) {
    byId("prompt").focus();
  }
});
byId("key-forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
window.addEventListener("hashchange", () => {
  if (takeKeyOfLink()) {
    location.reload();
    return;
  }
  showView();
  // Without scrolling: the header would go out of sight.
  byId("content").focus({ preventScroll: true });
});

takeKeyOfLink();
showView();
if (key.get() === "") {
  showKeyPanel(true);
} else {
  begin();
}
