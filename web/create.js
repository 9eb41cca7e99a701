// Dialogs that create VMs and disks.

import { act, attach, buttons, choice, field } from "./actions.js";
import { screenBox } from "./actions-vm.js";
import { dialog, h, note } from "./dom.js";
import { bytes, parseSize } from "./format.js";
import { state } from "./store.js";

const MIB = 1024 ** 2;

/** A field for a size. */
function sizeField(label, name, value) {
  const size = field(label, { name, required: true, value });
  const check = () =>
    size.input.setCustomValidity(parseSize(size.input.value) ? "" : "A number and a unit: 20G, 512M, 1T.");
  size.input.addEventListener("input", check);
  check();
  return size;
}

/** A field for the name of something new. */
export const nameField = () => field("Name", { name: "name", required: true, maxlength: 128 });

/** A list of the repositories that are attached, those with the most space first. */
export function srChoice(chosen) {
  const all = [...state.sr.values()].filter(
    (sr) => sr.state === "attached" && !sr.variant?.read_only && sr.source?.type !== "iso",
  );
  all.sort((a, b) => (b.uuid === chosen) - (a.uuid === chosen) || (b.space?.free ?? 0) - (a.space?.free ?? 0));
  if (!all.length) {
    note(
      "bad",
      "There is no repository that a disk can be created in.",
      "Create one: tapline sr create local --dir /srv/vms",
    );
    return null;
  }
  return choice(
    "Repository",
    all.map((sr) => ({ value: sr.uuid, text: `${sr.name} (${bytes(sr.space?.free)} free)` })),
  );
}

/** Creates a disk, in a repository if one is given, and attaches it to a VM if one is given. */
export async function createDisk(sr, vm) {
  const where = srChoice(sr);
  if (!where) return;
  const [name, size] = [
    nameField(),
    sizeField("Size, for example 20G", "size", "20G"),
  ];
  const content = h("div", {}, name.element, h("div", { class: "pair" }, size.element, where.element));
  const title = vm ? `Create a disk for '${vm.name}'` : "Create a disk";
  if (!(await dialog(title, content, buttons("Create the disk")))) return;
  const wanted = { sr: where.input.value, name: name.input.value.trim(), size: parseSize(size.input.value) };
  const task = await act(`Disk '${wanted.name}'`, "POST", "/vdis", wanted);
  if (task && vm) await attach(vm, task.result.uuid, wanted.name);
}

/** Creates a halted VM, with a new disk if wanted. */
export async function createVm() {
  const where = srChoice(null);
  if (!where) return;
  const name = nameField();
  const vcpus = field("Processors", { name: "vcpus", type: "number", min: 1, max: 255, required: true, value: 2 });
  const memory = sizeField("Memory, for example 2G", "memory", "2G");
  const size = field("Size of a new disk (empty: no disk)", { name: "size", value: "20G" });
  size.input.addEventListener("input", () => {
    const isRight = !size.input.value.trim() || parseSize(size.input.value);
    size.input.setCustomValidity(isRight ? "" : "A number and a unit: 20G, 512M, 1T.");
  });
  const screen = screenBox(true);
  const cdrom = field("Installation medium: a file on the host (empty: none)", {
    name: "cdrom",
    placeholder: "/srv/iso/debian.iso",
  });
  const nic = field("Bridge for its network card (empty: no network)", { name: "bridge", placeholder: "br0" });
  const content = h(
    "div",
    {},
    name.element,
    h("div", { class: "pair" }, vcpus.element, memory.element, size.element, where.element),
    cdrom.element,
    nic.element,
    screen.element,
  );
  if (!(await dialog("Create a VM", content, buttons("Create the VM")))) return;
  const platform = screen.platform({});
  if (cdrom.input.value.trim()) platform.dvd = `file:${cdrom.input.value.trim()}`;
  if (nic.input.value.trim()) platform.nic = `bridge:${nic.input.value.trim()}`;
  const wanted = {
    name: name.input.value.trim(),
    driver: "qemu",
    vcpus: Number(vcpus.input.value),
    platform,
    memory: Math.ceil(parseSize(memory.input.value) / MIB) * MIB,
  };
  const vm = await act(`VM '${wanted.name}'`, "POST", "/vms", wanted);
  if (!vm) return;
  location.hash = `#/vm/${vm.uuid}`;
  if (!size.input.value.trim()) return;
  const disk = { sr: where.input.value, name: wanted.name, size: parseSize(size.input.value) };
  const task = await act(`Disk '${disk.name}'`, "POST", "/vdis", disk);
  if (task) await attach(vm, task.result.uuid, disk.name);
}
