// What can be done from the page. Each action says what it does and is confirmed; its task is watched to its end.

import { change, get } from "./api.js";
import { dialog, h, note, noteProblem } from "./dom.js";
import { bytes, parseSize } from "./format.js";
import { hurry } from "./store.js";

const IS_OVER = ["done", "failed", "cancelled", "stuck"];

/** Asks for something and watches what comes of it; says the one or the other. */
async function act(title, method, path, body) {
  try {
    let task = await change(method, path, body);
    if (task?.verb !== undefined && path.indexOf("/tasks/") !== 0) {
      const said = note("", `${title}: begun`);
      while (!IS_OVER.includes(task.state)) task = await get(`/tasks/${task.uuid}?wait=20`, { seconds: 30 });
      said.remove();
    }
    if (task?.problem && task.state !== "done") {
      noteProblem(`${title}: ${task.state}`, { message: task.problem.detail, advice: task.problem.advice });
    } else {
      note("good", `${title}: ${task?.state ?? "done"}`);
    }
    hurry();
  } catch (problem) {
    if (problem.status === 0) problem.advice = "It may have been done all the same: look before you repeat it.";
    noteProblem(`${title}: ${problem.status === 0 ? "not known" : "not done"}`, problem);
  }
}

const buttons = (label, kind = "primary") => [{ label: "Cancel", value: null }, { label, value: "do", kind }];

function field(label, attributes) {
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

export const snapshot = (vdi) => named("Snapshot", "Take the snapshot", vdi, "snapshot",
  "A read-only snapshot is taken. The guest goes on; what it has not flushed may be missing in the snapshot.");

export const clone = (vdi) => named("Clone", "Make the clone", vdi, "clone",
  "A new writable disk is made that shares its unchanged data with this one.");

export async function resize(vdi) {
  const size = field("New size, for example 20G", { name: "size", required: true });
  size.input.addEventListener("input", () => {
    const wanted = parseSize(size.input.value);
    const why = wanted === null ? "A number and a unit: 20G, 512M, 1T."
      : wanted <= vdi.size ? `A disk can only grow; it has ${bytes(vdi.size)}.` : "";
    size.input.setCustomValidity(why);
  });
  const content = h("div", {},
    h("p", {}, `The disk has ${bytes(vdi.size)}. It can grow while it is plugged, and cannot shrink again.`),
    size.element);
  if (!(await dialog(`Resize '${vdi.name}'`, content, buttons("Resize")))) return;
  await act(`Resize of '${vdi.name}'`, "POST", `/vdis/${vdi.uuid}/resize`, { size: parseSize(size.input.value) });
}

export async function limit(vbd, name) {
  const now = vbd.limits ?? {};
  const iops = field("Requests per second (empty: no limit)", { name: "iops", inputmode: "numeric" });
  const bandwidth = field("Bytes per second, for example 100M (empty: no limit)", { name: "bandwidth" });
  iops.input.value = now.iops ?? "";
  bandwidth.input.value = now.bandwidth ?? "";
  const check = ({ input }, read, why) => input.addEventListener("input", () => {
    input.setCustomValidity(input.value.trim() && read(input.value) === null ? why : "");
  });
  const whole = (text) => (/^[0-9]+$/.test(text.trim()) ? Number(text) : null);
  check(iops, whole, "A whole number: 5000.");
  check(bandwidth, parseSize, "A number and a unit: 100M, 1G.");
  const content = h("div", {},
    h("p", {}, "The limits hold at once, also while the guest works. Flushes are not limited."),
    iops.element, bandwidth.element);
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
  const read = (text) => (/^[0-9]+$/.test(text.trim()) && Number(text) >= 1 && Number(text) <= 10000 ? Number(text) : null);
  weight.input.addEventListener("input", () => {
    weight.input.setCustomValidity(read(weight.input.value) === null ? "A whole number from 1 to 10000." : "");
  });
  const content = h("div", {},
    h("p", {}, "While more is asked of the storage than it can do, its disks get parts of it by their weights."),
    weight.element);
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
  if (!(await dialog(title, h("div", {}, lines.map((line) => h("p", {}, line))), buttons("Destroy", "danger")))) return;
  await act(title, "DELETE", `/vdis/${vdi.uuid}`);
}

export async function plug(vbd, name) {
  const content = h("p", {}, `A process is started that serves the disk over ${vbd.transport}.`);
  if (!(await dialog(`Plug '${name}'`, content, buttons("Plug")))) return;
  await act(`Plug of '${name}'`, "POST", `/vbds/${vbd.uuid}/plug`);
}

export async function unplug(vbd, name) {
  const content = h("p", {}, "The guest is asked to release the disk, which then has no process. It loses the disk; " +
    "what it has written is flushed.");
  if (!(await dialog(`Unplug '${name}'`, content, buttons("Unplug", "danger")))) return;
  await act(`Unplug of '${name}'`, "POST", `/vbds/${vbd.uuid}/unplug`, {});
}

export async function cancelTask(task) {
  const content = h("p", {}, "The task is rolled back: what it has done so far is undone.");
  if (!(await dialog(`Cancel ${task.verb}`, content, buttons("Cancel the task", "danger")))) return;
  await act(`Cancel of ${task.verb}`, "POST", `/tasks/${task.uuid}/cancel`);
}
