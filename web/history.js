// The last day of a disk by minute, as the daemon keeps it: rates and latencies.

import { get } from "./api.js";
import { h, setText } from "./dom.js";
import { duration, megabytes, number } from "./format.js";
import { Plot } from "./plots.js";

const DAY = 24 * 3600;
/** How often it is read, in milliseconds. */
const PERIOD = 60000;

/** The series of a history, each by time. A minute without requests has no point: there is a zero at both ends of a gap. */
export function seriesOf({ step, points }, now = Date.now() / 1000) {
  const rows = [];
  const zero = (at) => rows.push([at, 0, 0, 0, 0, null, null]);
  let last = now - DAY - step;
  for (const point of points) {
    const at = Date.parse(point.at) / 1000;
    if (at - last > step) {
      zero(last + step);
      if (at - last > 2 * step) zero(at - step);
    }
    rows.push([at, point.reads, point.writes, point.read_bytes, point.written_bytes, point.mean_ns, point.p99_ns]);
    last = at;
  }
  if (now - last > 2 * step) {
    zero(last + step);
    zero(now - step);
  }
  return rows.length ? rows[0].map((_, column) => rows.map((row) => row[column])) : Array.from({ length: 7 }, () => []);
}

/** A section with the history of a VBD. */
export function history(vbd) {
  const options = { span: DAY };
  const iops = new Plot("IOPS, last 24 hours", ["read", "write"], { ...options, value: number });
  const bytes = new Plot("Throughput, last 24 hours", ["read", "write"], { ...options, value: megabytes });
  const latency = new Plot("Latency, last 24 hours", ["mean", "p99"], { ...options, value: duration, log: true });
  const plots = [iops, bytes, latency];
  const why = h("p", { class: "dim", hidden: true });
  let readAt = 0;
  return {
    vbd,
    element: h(
      "div",
      {},
      h(
        "div",
        { class: "grid" },
        plots.map((plot) => plot.element),
      ),
      why,
    ),
    async draw() {
      if (Date.now() - readAt < PERIOD) return;
      readAt = Date.now();
      try {
        const [at, reads, writes, read, written, mean, p99] = seriesOf(await get(`/vbds/${vbd}/history`));
        iops.set([at, reads, writes]);
        bytes.set([at, read, written]);
        latency.set([at, mean, p99]);
        why.hidden = true;
      } catch (problem) {
        why.hidden = false;
        setText(why, `The history cannot be read: ${problem.message}`);
      }
    },
    destroy() {
      for (const plot of plots) plot.destroy();
    },
  };
}
