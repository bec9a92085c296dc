// Settling all dead letters that a filter finds, of runs or of the event bus: put them back, or drop them.

import { call } from "../lib/api.js";
import { openDialog } from "../lib/dialog.js";
import { h, newId } from "../lib/dom.js";
import { toast } from "../lib/toast.js";
import { eachOf, readAll, refusals } from "./bulk.js";

const DONE = { requeue: "put back", drop: "dropped" };

// `resource` is `letters` or `bus`; `fields` is the filter; `words` says what each choice does.
export async function letterBulk(resource, fields, words, done) {
  const letters = await readAll(resource === "bus" ? "bus.letters" : "letters.list", fields);
  const id = newId("settle");
  const count = letters.length.toLocaleString();
  const choice = h("select", { id }, h("option", { value: "requeue" }, "Put all back"), h("option", { value: "drop" }, "Drop all"));
  const hint = h("p", { class: "hint" }, words.requeue);
  const bar = h("progress", { max: Math.max(1, letters.length), value: 0, hidden: true, "aria-label": "Progress" });
  const result = h("div", {});
  const action = () => `${choice.value === "drop" ? "Drop" : "Requeue"} ${count}`;
  const dialog = openDialog({
    title: `All ${count} dead letters`,
    action: action(),
    body: [h("div", { class: "field" }, h("label", { for: id }, "What to do"), choice), hint, bar, result],
    act: async () => {
      const how = choice.value;
      const refused = await eachOf(letters, bar, ({ letter_id }) => call(`${resource}.${how}`, { letter_id }));
      toast(`${(letters.length - refused.length).toLocaleString()} ${DONE[how]}.`);
      done();
      return refusals(result, refused, (letter) => letter.run_id ?? letter.letter_id);
    },
  });
  const go = dialog.querySelector("button[type=submit]");
  choice.addEventListener("change", () => {
    hint.textContent = words[choice.value];
    go.textContent = action();
    go.classList.toggle("danger", choice.value === "drop");
  });
}
