// What can be done from the page. Each action says what it does and is confirmed; its task is watched to its end.

import { change, get } from "./api.js";
import { dialog, h, note, noteProblem } from "./dom.js";
import { bytes, moment, parseSize } from "./format.js";
import { taskWords } from "./health.js";
import { hurry, state } from "./store.js";

const IS_OVER = ["done", "failed", "cancelled", "stuck"];

/** Requests something, waits for its task, and shows the outcome; returns the last answer if it was done, else `null`. */
export async function act(title, method, path, body) {
  try {
    let task = await change(method, path, body);
    if (task?.verb !== undefined && path.indexOf("/tasks/") !== 0) {
      const said = note("", `${title}: started`);
      while (!IS_OVER.includes(task.state)) task = await get(`/tasks/${task.uuid}?wait=20`, { seconds: 30 });
      said.remove();
    }
    if (task?.problem && task.state !== "done") {
      noteProblem(`${title}: ${task.state}`, { message: task.problem.detail, advice: task.problem.advice });
      return null;
    }
    // Only tasks have a verb; a VM's or disk's own state says nothing of the request.
    note("good", `${title}: ${task?.verb === undefined ? "done" : task.state}`);
    hurry();
    return task ?? {};
  } catch (problem) {
    if (problem.status === 0) problem.advice = "It may have been done all the same: look before you repeat it.";
    noteProblem(`${title}: ${problem.status === 0 ? "not known" : "not done"}`, problem);
    return null;
  }
}

export const buttons = (label, kind = "primary") => [
  { label: "Cancel", value: null },
  { label, value: "do", kind },
];

export function field(label, attributes) {
  const input = h("input", { type: "text", autocomplete: "off", ...attributes });
  return { input, element: h("label", {}, label, input) };
}

async function named(what, label, vdi, verb, sentence) {
  const name = field("Name (empty: made from the disk's name)", { name: "name" });
  const content = h("div", {}, h("p", {}, sentence), name.element);
  const title = `${what} of '${vdi.name}'`;
  if (!(await dialog(title, content, buttons(label)))) return;
  const chosen = name.input.value.trim();
  await act(title, "POST", `/vdis/${vdi.uuid}/${verb}`, chosen ? { name: chosen } : {});
}

export const snapshot = (vdi) =>
  named(
    "Snapshot",
    "Take the snapshot",
    vdi,
    "snapshot",
    "A read-only snapshot is taken while the guest runs. Data that the guest has not flushed may be missing in it.",
  );

export const clone = (vdi) =>
  named(
    "Clone",
    "Create the clone",
    vdi,
    "clone",
    "A new writable disk is created that shares its unchanged data with this one.",
  );

export async function resize(vdi) {
  const size = field("New size, for example 20G", { name: "size", required: true });
  size.input.addEventListener("input", () => {
    const wanted = parseSize(size.input.value);
    const why =
      wanted === null
        ? "A number and a unit: 20G, 512M, 1T."
        : wanted <= vdi.size
          ? `A disk can only grow; it has ${bytes(vdi.size)}.`
          : "";
    size.input.setCustomValidity(why);
  });
  const content = h(
    "div",
    {},
    h("p", {}, `The disk has ${bytes(vdi.size)}. It can grow while it is plugged, and cannot shrink again.`),
    size.element,
  );
  if (!(await dialog(`Resize '${vdi.name}'`, content, buttons("Resize")))) return;
  await act(`Resize of '${vdi.name}'`, "POST", `/vdis/${vdi.uuid}/resize`, { size: parseSize(size.input.value) });
}

export async function limit(vbd, name) {
  const now = vbd.limits ?? {};
  const iops = field("Requests per second (empty: no limit)", { name: "iops", inputmode: "numeric" });
  const bandwidth = field("Bytes per second, for example 100M (empty: no limit)", { name: "bandwidth" });
  iops.input.value = now.iops ?? "";
  bandwidth.input.value = now.bandwidth ?? "";
  const check = ({ input }, read, why) =>
    input.addEventListener("input", () => {
      input.setCustomValidity(input.value.trim() && read(input.value) === null ? why : "");
    });
  const whole = (text) => (/^[0-9]+$/.test(text.trim()) ? Number(text) : null);
  check(iops, whole, "A whole number: 5000.");
  check(bandwidth, parseSize, "A number and a unit: 100M, 1G.");
  const content = h(
    "div",
    {},
    h("p", {}, "The limits hold at once, also while the guest works. Flushes are not limited."),
    iops.element,
    bandwidth.element,
  );
  if (!(await dialog(`Limit '${name}'`, content, buttons("Set the limits")))) return;
  // What is not asked for here stays: limits of reads and of writes alone, and the burst.
  const limits = { ...now, iops: whole(iops.input.value), bandwidth: parseSize(bandwidth.input.value) };
  const wanted = Object.fromEntries(Object.entries(limits).filter(([, value]) => value !== null));
  if (Object.keys(wanted).every((key) => key === "burst_ms")) delete wanted.burst_ms;
  await act(`Limits of '${name}'`, "POST", `/vbds/${vbd.uuid}/limit`, wanted);
}

export async function share(vbd, name) {
  const weight = field("Weight, 1 to 10000; 100 is usual", { name: "weight", inputmode: "numeric" });
  weight.input.value = vbd.share_weight;
  const read = (text) =>
    /^[0-9]+$/.test(text.trim()) && Number(text) >= 1 && Number(text) <= 10000 ? Number(text) : null;
  weight.input.addEventListener("input", () => {
    weight.input.setCustomValidity(read(weight.input.value) === null ? "A whole number from 1 to 10000." : "");
  });
  const content = h(
    "div",
    {},
    h("p", {}, "While more is asked of the storage than it can do, its disks get parts of it by their weights."),
    weight.element,
  );
  if (!(await dialog(`Share of '${name}'`, content, buttons("Set the weight")))) return;
  await act(`Weight of '${name}'`, "POST", `/vbds/${vbd.uuid}/share`, { weight: read(weight.input.value) });
}

export async function destroy(vdi) {
  const title = `Destroy '${vdi.name}'`;
  let plan;
  try {
    plan = await change("DELETE", `/vdis/${vdi.uuid}?dry_run=true`);
  } catch (problem) {
    noteProblem(`${title}: not possible`, problem);
    return;
  }
  const lines = plan.removes.length
    ? [`These files are removed, which frees ${bytes(plan.freed)}:`, ...plan.removes]
    : [`No file is removed now: ${plan.needed_by} images are based on it. The VDI disappears all the same.`];
  lines.push("This cannot be undone.");
  if (
    !(await dialog(
      title,
      h(
        "div",
        {},
        lines.map((line) => h("p", {}, line)),
      ),
      buttons("Destroy", "danger"),
    ))
  )
    return;
  await act(title, "DELETE", `/vdis/${vdi.uuid}`);
}

export async function plug(vbd, name) {
  const content = h("p", {}, `A process is started that serves the disk over ${vbd.transport}.`);
  if (!(await dialog(`Plug '${name}'`, content, buttons("Plug")))) return;
  await act(`Plug of '${name}'`, "POST", `/vbds/${vbd.uuid}/plug`);
}

export async function unplug(vbd, name) {
  const content = h(
    "p",
    {},
    "The guest loses the disk: it is requested to release it, its writes are flushed, and the " +
      "process of the disk ends.",
  );
  if (!(await dialog(`Unplug '${name}'`, content, buttons("Unplug", "danger")))) return;
  await act(`Unplug of '${name}'`, "POST", `/vbds/${vbd.uuid}/unplug`, {});
}

export async function detach(vbd, name) {
  const content = h("p", {}, "The block device is removed from its machine. The disk and its data stay.");
  if (!(await dialog(`Detach '${name}'`, content, buttons("Detach", "danger")))) return;
  await act(`Detach of '${name}'`, "DELETE", `/vbds/${vbd.uuid}`);
}

export async function revert(vdi, snapshot) {
  const content = h(
    "p",
    {},
    `The disk will be as it was on ${moment(snapshot.snapshot_time)}. Data written since then is ` +
      "lost, unless you take a snapshot first. The other snapshots stay.",
  );
  if (!(await dialog(`Revert '${vdi.name}' to '${snapshot.name}'`, content, buttons("Revert", "danger")))) return;
  await act(`Revert of '${vdi.name}'`, "POST", `/vdis/${vdi.uuid}/revert`, { snapshot: snapshot.uuid });
}

export async function cancelTask(task) {
  const content = h("p", {}, "The task is rolled back: what it has done so far is undone.");
  if (!(await dialog(`Cancel the ${taskWords(task)}`, content, buttons("Cancel the task", "danger")))) return;
  await act(`Cancel of ${taskWords(task)}`, "POST", `/tasks/${task.uuid}/cancel`);
}

/** Sets the tags of an object in one of the API's lists. */
export async function setTags(list, object) {
  const input = field("Tags, separated by commas", { name: "tags" });
  input.input.value = (object.tags ?? []).join(", ");
  const content = h(
    "div",
    {},
    h("p", {}, "Tags find objects, and say which of them an operator's token may operate."),
    input.element,
  );
  if (!(await dialog(`Tags of '${object.name}'`, content, buttons("Set the tags")))) return;
  const tags = [
    ...new Set(
      input.input.value
        .split(",")
        .map((tag) => tag.trim())
        .filter(Boolean),
    ),
  ];
  await act(`Tags of '${object.name}'`, "PATCH", `/${list}/${object.uuid}`, { tags });
}

const PERIODS = { hourly: "hours", daily: "days", weekly: "weeks", monthly: "months" };

/** Sets the schedule of snapshots of a VM or a disk. */
export async function schedule(list, object) {
  const fields = Object.entries(PERIODS).map(([name, unit]) => {
    const one = field(`Snapshots of this many ${unit}`, { name, type: "number", min: 0, max: 50, placeholder: 0 });
    one.input.value = object.retention?.[name] || "";
    return { name, ...one };
  });
  const content = h(
    "div",
    {},
    h(
      "p",
      {},
      "A snapshot is taken once in the shortest period that has a number, and the last " +
        "one of each period is kept: 50 at most together. Without a number the schedule ends; its snapshots stay.",
    ),
    h(
      "div",
      { class: "pair" },
      fields.map(({ element }) => element),
    ),
  );
  if (!(await dialog(`Schedule of '${object.name}'`, content, buttons("Set the schedule")))) return;
  const wanted = fields
    .filter(({ input }) => Number(input.value) > 0)
    .map(({ name, input }) => [name, Number(input.value)]);
  const retention = wanted.length ? Object.fromEntries(wanted) : null;
  await act(`Schedule of '${object.name}'`, "PATCH", `/${list}/${object.uuid}`, { retention });
}

/** The disks that a VM could get: not snapshots, and not in use. */
const freeDisks = () =>
  [...state.vdi.values()]
    .filter((vdi) => !vdi.snapshot_of && !vdi.users.length)
    .filter((vdi) => ![...state.vbd.values()].some((vbd) => vbd.vdi === vdi.uuid))
    .sort((a, b) => (a.name < b.name ? -1 : 1));

/** A list to choose one object from. */
export function choice(label, options) {
  const input = h(
    "select",
    {},
    options.map(({ value, text }) => h("option", { value }, text)),
  );
  return { input, element: h("label", {}, label, input) };
}

/** Attaches a disk to a VM, and plugs it if the VM runs. */
export async function attach(vm, vdi, name) {
  const vbd = await act(`Attach '${name}' to '${vm.name}'`, "POST", "/vbds", { vdi, vm: vm.uuid });
  if (vbd && ["running", "paused"].includes(vm.power)) await act(`Plug of '${name}'`, "POST", `/vbds/${vbd.uuid}/plug`);
}

export async function attachDisk(vm) {
  const disks = freeDisks();
  if (!disks.length) {
    note("", "There is no disk without a VM.", "Create one first.");
    return;
  }
  const list = choice(
    "Disk",
    disks.map((vdi) => ({ value: vdi.uuid, text: `${vdi.name} (${bytes(vdi.size)})` })),
  );
  if (!(await dialog(`Attach a disk to '${vm.name}'`, list.element, buttons("Attach")))) return;
  await attach(vm, list.input.value, state.vdi.get(list.input.value)?.name ?? "the disk");
}
