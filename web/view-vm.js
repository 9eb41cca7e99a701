// A VM: its state, what can be done with it, its disks, snapshots, schedule, and its console.

import { attachDisk, schedule, setTags } from "./actions.js";
import { cloneVm, destroyVm, editVm, operateVm, shutdownVm, snapshotVm } from "./actions-vm.js";
import { createDisk } from "./create.js";
import { facts, h, setText } from "./dom.js";
import { bytes, duration, megabytes, moment, number } from "./format.js";
import { get, getText } from "./api.js";
import { powerLevel, vbdLevel, vbdWord } from "./health.js";
import { go, section, sectionWith } from "./parts.js";
import { scheduleWords } from "./view-schedules.js";
import { screen } from "./screen.js";
import { vmSnapshots } from "./snapshots.js";
import { state, takeDisks, want } from "./store.js";
import { Table } from "./table.js";
import { importDisk } from "./upload.js";

/** How often the serial console and the snapshots are read, in milliseconds. */
const CONSOLE_PERIOD = 2000;
const SNAPSHOTS_PERIOD = 15000;

const button = (label, onclick, kind) => h("button", { type: "button", class: kind, onclick }, label);

/** The buttons; those that the VM's state does not allow are off. */
function actionBar(vm) {
  const is =
    (...powers) =>
    () =>
      powers.includes(vm().power);
  const all = [
    [button("Start", () => operateVm(vm(), "start"), "primary"), is("halted", "suspended")],
    [button("Shut down", () => shutdownVm(vm())), is("running", "paused", "starting", "stopping")],
    [button("Pause", () => operateVm(vm(), "pause")), is("running")],
    [button("Resume", () => operateVm(vm(), "resume")), is("paused", "suspended")],
    [button("Suspend", () => operateVm(vm(), "suspend")), is("running", "paused")],
    [button("Snapshot", () => snapshotVm(vm())), is("running", "paused", "halted")],
    [button("Clone", () => cloneVm(vm())), () => true],
    [button("Change", () => editVm(vm())), is("halted")],
    [button("Tags", () => setTags("vms", vm())), () => true],
    [button("Destroy", () => destroyVm(vm())), is("halted", "suspended")],
  ];
  return {
    element: h(
      "div",
      { class: "bar", role: "group", "aria-label": "Actions" },
      all.map(([element]) => element),
    ),
    draw() {
      for (const [element, can] of all) {
        const off = !vm() || !can();
        if (element.disabled !== off) element.disabled = off;
      }
    },
  };
}

function diskTable() {
  const rate = (row) => row.disk?.rate;
  const columns = [
    { title: "Disk", grow: true, text: (row) => row.vdi?.name ?? row.vbd.vdi },
    { title: "State", text: (row) => vbdWord(row.vbd), level: (row) => vbdLevel(row.vbd) },
    { title: "Size", num: true, rank: 1, text: (row) => bytes(row.vdi?.size) },
    { title: "IOPS", num: true, text: (row) => (row.disk ? number(rate(row)?.iops) : "") },
    { title: "MB/s", num: true, rank: 2, text: (row) => (row.disk ? megabytes(rate(row)?.bytes) : "") },
    {
      title: "Oldest",
      num: true,
      rank: 3,
      text: (row) => (row.disk?.now.oldest_ns === undefined ? "" : duration(row.disk.now.oldest_ns)),
    },
    { title: "Repository", rank: 4, text: (row) => state.sr.get(row.vdi?.sr)?.name ?? "" },
    { title: "Access", rank: 5, text: (row) => (row.vbd.mode === "RO" ? "read-only" : "read-write") },
  ];
  const onOpen = (row) => go(`#/disk/${row.vbd.vdi}/${row.vbd.uuid}`);
  const table = new Table("Disks of the VM", columns, { onOpen, empty: "No disks" });
  table.element.classList.add("whole");
  return table;
}

const diskRows = (uuid) =>
  [...state.vbd.values()]
    .filter((vbd) => vbd.vm === uuid)
    .sort((a, b) => a.position - b.position)
    .map((vbd) => ({ key: vbd.uuid, vbd, vdi: state.vdi.get(vbd.vdi), disk: state.disks.get(vbd.uuid) }));

const bootWords = (boot) => (boot.from === "disk" ? "first bootable disk" : (boot.kernel ?? boot.from));

/** What the guest has written to its serial port lately. */
function serialConsole(vm) {
  const output = h("pre", { class: "console", tabindex: 0, "aria-label": "Output of the serial port" });
  const none = h("p", { class: "dim" });
  const element = section("Serial console", output, none);
  const read = async () => {
    let text = "";
    let why = "";
    try {
      text = await getText(`/vms/${vm().uuid}/console`);
    } catch (problem) {
      why = problem.message;
    }
    // Colours and movements of the cursor are left out.
    const plain = text.replace(/\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Za-z0-9]|\x1b[=>]|\r(?=\n)/g, "");
    const isAtEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 20;
    if (output.textContent !== plain) {
      output.textContent = plain;
      if (isAtEnd) output.scrollTop = output.scrollHeight;
    }
    output.hidden = !plain;
    setText(
      none,
      why || (plain ? `To type: tapline vm console ${vm().name}` : "The guest has written nothing to its serial port."),
    );
  };
  return { element, read };
}

export function machine(uuid) {
  want("/statistics", takeDisks);
  const vm = () => state.vm.get(uuid);
  const [heading, word, info] = [h("h1", {}, "VM"), h("span"), facts()];
  const actions = actionBar(vm);
  const disks = diskTable();
  let known = [];
  let snapshotsRead = 0;
  let consoleRead = 0;
  let lastTask;
  let isGone = false;
  const readSnapshots = async () => {
    snapshotsRead = Date.now();
    known = await get(`/vms/${uuid}/snapshots`).catch(() => known);
    if (!isGone && vm()) snapshots.set(vm(), known);
  };
  const snapshots = vmSnapshots(() => readSnapshots());
  const serial = serialConsole(vm);
  const display = screen(vm);
  const attach = h(
    "span",
    { class: "bar" },
    button("Create a disk", () => createDisk(null, vm())),
    button("Import a disk", () => importDisk(null, vm())),
    button("Attach a disk", () => attachDisk(vm())),
  );
  const [plan, planButton] = [h("p", {}), button("Set the schedule", () => schedule("vms", vm()))];
  const element = h(
    "div",
    {},
    h("div", { class: "title" }, heading, word),
    actions.element,
    section("Machine", info.element),
    h(
      "div",
      { class: "split" },
      h("div", {}, sectionWith("Disks", attach, disks.element), display.element, serial.element),
      h(
        "div",
        {},
        sectionWith("Snapshots", null, snapshots.table.element),
        sectionWith("Schedule of snapshots", planButton, plan),
      ),
    ),
  );
  return {
    element,
    table: disks,
    draw() {
      const one = vm();
      for (const part of [...element.children].slice(1)) part.hidden = !one;
      if (!one) {
        setText(heading, state.loaded ? `There is no VM ${uuid}` : "Loading…");
        return;
      }
      setText(heading, one.name);
      setText(word, one.power);
      word.dataset.level = powerLevel(one);
      info.set({
        Processors: one.vcpus,
        Memory: bytes(one.memory),
        Boot: bootWords(one.boot),
        Driver: one.driver,
        Process: one.pid ?? "",
        Network: one.platform.nic ?? "none",
        Autostart: one.autostart ? "yes" : "",
        Tags: (one.tags ?? []).join(", "),
        Description: one.description,
        Suspended: one.suspended ? `${moment(one.suspended.since)}, ${bytes(one.suspended.size)}` : "",
        Problem: one.problem?.detail,
        "What to do": one.problem?.advice,
      });
      actions.draw();
      disks.set(diskRows(uuid));
      setText(
        plan,
        scheduleWords(one) + (one.retention_problem ? `. The last one failed: ${one.retention_problem.detail}` : ""),
      );
      plan.className = one.retention_problem ? "bad" : "";
      // A task of the VM may have taken or destroyed one.
      const task = state.tasks.find(({ ended, about }) => ended && about.some((part) => part.uuid === uuid))?.uuid;
      if (task !== lastTask || Date.now() - snapshotsRead > SNAPSHOTS_PERIOD) readSnapshots();
      lastTask = task;
      const isOn = ["running", "paused"].includes(one.power);
      display.element.hidden = !isOn || !one.platform.vnc || one.platform.vnc === "none";
      serial.element.hidden = !isOn;
      if (!serial.element.hidden && Date.now() - consoleRead > CONSOLE_PERIOD) {
        consoleRead = Date.now();
        serial.read();
      }
    },
    destroy() {
      isGone = true;
      display.destroy();
    },
  };
}
