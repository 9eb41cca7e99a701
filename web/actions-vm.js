// What can be done with a VM and its snapshots. Each action that may lose data is confirmed.

import { act, buttons, field } from "./actions.js";
import { dialog, h } from "./dom.js";
import { bytes, moment, parseSize } from "./format.js";

const MIB = 1024 ** 2;

const WORDS = { start: "Start", pause: "Pause", resume: "Resume", suspend: "Suspend" };

/** Starts, pauses, resumes or suspends a VM. */
export const operateVm = (vm, verb) => act(`${WORDS[verb]} of '${vm.name}'`, "POST", `/vms/${vm.uuid}/${verb}`);

export async function shutdownVm(vm) {
  const content = h(
    "p",
    {},
    "The guest is requested to power off, and the task waits until it has. A guest that does not respond can be stopped " +
      "as if its power were cut: it loses what it has not written.",
  );
  const all = [
    { label: "Cancel", value: null },
    { label: "Cut the power now", value: "force", kind: "danger" },
    { label: "Shut down", value: "do", kind: "primary" },
  ];
  const answer = await dialog(`Shut down '${vm.name}'`, content, all);
  if (!answer) return;
  const body = answer === "force" ? { force: true } : {};
  await act(`Shutdown of '${vm.name}'`, "POST", `/vms/${vm.uuid}/shutdown`, body);
}

async function named(title, label, sentence, method, path) {
  const name = field("Name", { name: "name", required: true });
  const content = h("div", {}, h("p", {}, sentence), name.element);
  if (!(await dialog(title, content, buttons(label)))) return;
  await act(title, method, path, { name: name.input.value.trim() });
}

export async function snapshotVm(vm) {
  const name = field("Name (empty: made from the VM's name)", { name: "name" });
  const content = h(
    "div",
    {},
    h(
      "p",
      {},
      "A snapshot of all writable disks is taken at one moment. A running guest with " +
        "several disks is paused for that moment.",
    ),
    name.element,
  );
  if (!(await dialog(`Snapshot of '${vm.name}'`, content, buttons("Take the snapshot")))) return;
  const chosen = name.input.value.trim();
  await act(`Snapshot of '${vm.name}'`, "POST", `/vms/${vm.uuid}/snapshot`, chosen ? { name: chosen } : {});
}

export const cloneVm = (vm) =>
  named(
    `Clone of '${vm.name}'`,
    "Create the clone",
    "A halted VM with the same hardware is created. Its disks share their unchanged data with those of this VM.",
    "POST",
    `/vms/${vm.uuid}/clone`,
  );

/** The hardware of a screen that is shown in the page. */
const SCREEN = { vga: "std", vnc: "private", usb: "true", usb_tablet: "true" };

/** A box to check for a screen; `platform(before)` is the VM's platform with or without one. */
export function screenBox(checked) {
  const input = h("input", { type: "checkbox", name: "screen", checked });
  return {
    input,
    element: h("label", { class: "check" }, input, "A screen, shown in this page"),
    platform(before) {
      if (input.checked) return { ...before, ...SCREEN };
      const others = Object.entries(before).filter(([key]) => !(key in SCREEN));
      return Object.fromEntries(others);
    },
  };
}

export async function editVm(vm) {
  const vcpus = field("Processors", {
    name: "vcpus",
    type: "number",
    min: 1,
    max: 255,
    required: true,
    value: vm.vcpus,
  });
  const memory = field("Memory, for example 2G", { name: "memory", required: true, value: bytes(vm.memory) });
  memory.input.addEventListener("input", () => {
    memory.input.setCustomValidity(parseSize(memory.input.value) === null ? "A number and a unit: 2G, 512M." : "");
  });
  const screen = screenBox(Boolean(vm.platform.vnc));
  const content = h("div", {}, h("div", { class: "pair" }, vcpus.element, memory.element), screen.element);
  if (!(await dialog(`Change '${vm.name}'`, content, buttons("Change the VM")))) return;
  // A size that was only shown, with three digits, is not sent back.
  const wanted = parseSize(memory.input.value);
  const isSame = memory.input.value === bytes(vm.memory);
  await act(`Change of '${vm.name}'`, "PATCH", `/vms/${vm.uuid}`, {
    vcpus: Number(vcpus.input.value),
    ...(isSame ? {} : { memory: Math.ceil(wanted / MIB) * MIB }),
    ...(screen.input.checked === Boolean(vm.platform.vnc) ? {} : { platform: screen.platform(vm.platform) }),
  });
}

export async function destroyVm(vm) {
  const memory = vm.suspended ? " Its saved memory is lost." : "";
  const content = h("p", {}, `The VM and its block devices are removed. Its disks stay.${memory}`);
  if (!(await dialog(`Destroy '${vm.name}'`, content, buttons("Destroy", "danger")))) return;
  await act(`Destroy '${vm.name}'`, "DELETE", `/vms/${vm.uuid}`);
}

export async function revertVm(vm, snapshot) {
  const content = h(
    "p",
    {},
    `All disks of the VM will be as they were on ${moment(snapshot.created)}. Data written since ` +
      "then is lost, unless you take a snapshot first. The hardware of the VM and the other snapshots stay.",
  );
  if (!(await dialog(`Revert '${vm.name}' to '${snapshot.name}'`, content, buttons("Revert", "danger")))) return;
  await act(`Revert of '${vm.name}'`, "POST", `/vms/${vm.uuid}/revert`, { snapshot: snapshot.uuid });
}

/** Has a scheduled snapshot stay that its schedule would destroy one day. */
export const pinSnapshot = (vm, snapshot) =>
  act(`Pin '${snapshot.name}'`, "PATCH", `/vms/${vm.uuid}/snapshots/${snapshot.uuid}`, { scheduled: false });

export async function destroyVmSnapshot(vm, snapshot) {
  const content = h("p", {}, "The snapshots of all disks that belong to it are destroyed. This cannot be undone.");
  if (!(await dialog(`Destroy '${snapshot.name}'`, content, buttons("Destroy", "danger")))) return;
  await act(`Destroy '${snapshot.name}'`, "DELETE", `/vms/${vm.uuid}/snapshots/${snapshot.uuid}`);
}
