// The page: the API key, the form, and the policy that answers.

import { key, onRefusedKey } from "./api.js";
import { AskView } from "./ask.js";
import { byId, setText } from "./dom.js";
import { PolicyWatch } from "./policy.js";
import { showProblems } from "./problems.js";

const ask = new AskView();
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

function showKeyPanel(isOpen, problem = "") {
  byId("key-panel").hidden = !isOpen;
  byId("key-toggle").setAttribute("aria-expanded", String(isOpen));
  byId("key-forget").hidden = key.get() === "";
  setText(byId("key-error"), problem);
  if (isOpen) {
    byId("key").focus();
  }
}

/** Start everything that needs a key. A key that the service refuses is reported where it is entered. */
async function begin() {
  try {
    await ask.loadModels();
  } catch (error) {
    if (error.status === 401 || error.status === 403) {
      return;
    }
    // An unreachable service: `PolicyWatch` tries again.
  }
  showKeyPanel(false);
  showProblems((prompt) => ask.askFor(prompt));
  policy.start();
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
  }
});

takeKeyOfLink();
if (key.get() === "") {
  showKeyPanel(true);
} else {
  begin();
}
