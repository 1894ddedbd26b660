// What one rank does now: its state, its last operations, its stacks and its last output. It is asked
// on demand.

import { byId, each, fillTable, make, setText } from "./dom.js";
import { duration, percent } from "./format.js";
import { ask } from "./source.js";

/** The states of a process in words. */
const DOING = {
  running: "running",
  sleeping: "sleeping",
  uninterruptible: "waiting for a disk or a file system",
  stopped: "stopped by a signal or a debugger",
  gone: "gone: its process has ended",
  absent: "absent: it has not joined the job",
  left: "gone: it has left the job",
  unknown: "in an unknown state",
};

/** The rank that is shown, and the element that opened it. */
let open = null;

/** Shows what a rank does now. `from` gets the focus back. */
export function openRank(rank, from) {
  open = { rank, from };
  const place = byId("rank");
  place.hidden = false;
  setText(byId("rank-title"), `Rank ${rank}`);
  byId("rank-title").focus();
  place.scrollIntoView({ block: "nearest" });
  look();
}

function close() {
  byId("rank").hidden = true;
  open?.from.focus();
  open = null;
}

async function look() {
  const { rank } = open;
  const state = byId("rank-state");
  byId("rank-found").hidden = true;
  setText(state, "asking the rank …");
  let seen;
  try {
    seen = await ask(`/api/v1/ranks/${rank}`);
  } catch (error) {
    if (open?.rank === rank) setText(state, error.message);
    return;
  }
  // Meanwhile the reader may have chosen another rank.
  if (open?.rank !== rank) return;
  byId("rank-found").hidden = false;
  setText(byId("rank-title"), `Rank ${rank} on ${seen.host}`);
  setText(state, inWords(seen));
  fillTable(byId("rank-operations"), {
    heads: ["Tensor", "Call", "Submitted", "Outcome"],
    rows: seen.operations.map((it) => ({
      cells: [
        it.name,
        it.call,
        { number: `${duration(it.age_seconds)} ago` },
        it.outcome.replace("-", " "),
      ],
    })),
    none: "It has submitted nothing.",
  });
  showStacks(seen.stacks);
  const output = seen.output ?? [];
  byId("rank-wrote").hidden = output.length === 0;
  setText(byId("rank-output"), output.join("\n"));
}

function inWords({ pid, doing, cpu, kernel_call: call, answered, submitted }) {
  const process = pid == null ? "Its process is" : `Process ${pid} is`;
  const where = call ? ` in ${call}` : "";
  const load = doing === "running" ? `, ${percent(cpu)} of a core` : "";
  const silent = answered ? "" : " The process itself has not answered.";
  return `${process} ${DOING[doing] ?? doing}${where}${load}. ` +
    `It has submitted ${submitted} operations.${silent}`;
}

function showStacks(stacks) {
  const none = stacks === null
    ? "Stacks are shown only to those who have a token: set metrics.token_file. " +
      "Or use gradwire why --stacks in a terminal."
    : stacks.length ? "" : "Only the system knows its threads.";
  setText(byId("rank-no-stacks"), none);
  const create = () => {
    const stack = make("pre");
    stack.tabIndex = 0;
    return make("li", "", make("h4"), stack);
  };
  each(byId("rank-stacks"), stacks ?? [], create, (item, { name, frames }) => {
    setText(item.firstElementChild, name);
    setText(item.lastElementChild, frames.join("\n"));
    item.lastElementChild.setAttribute("aria-label", `Stack of the thread ${name}`);
  });
}

byId("rank-again").addEventListener("click", look);
byId("rank-close").addEventListener("click", close);
byId("rank").addEventListener("keydown", (event) => {
  if (event.key === "Escape") close();
});
