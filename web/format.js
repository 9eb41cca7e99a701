// Numbers for people.

const trimmed = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

/** A number with three digits or so; nothing for what is not known yet. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (value >= 1e6) return `${trimmed(value / 1e6)} M`;
  if (value >= 1e4) return `${trimmed(value / 1e3)} k`;
  return Number.isInteger(value) ? String(value) : trimmed(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : trimmed(value)} ${units[unit]}`;
}

/** Bytes a second, in units of 10⁶ as storage is measured. */
export const megabytes = (value) => (value === null || value === undefined ? "–" : `${number(value / 1e6)} MB/s`);

export function duration(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  if (ns < 1e3) return `${Math.round(ns)} ns`;
  if (ns < 1e6) return `${trimmed(ns / 1e3)} µs`;
  if (ns < 1e9) return `${trimmed(ns / 1e6)} ms`;
  if (ns < 120e9) return `${trimmed(ns / 1e9)} s`;
  return `${Math.floor(ns / 60e9)} min ${Math.round((ns % 60e9) / 1e9)} s`;
}

export const time = (text) => new Date(text).toLocaleTimeString();
export const moment = (text) => new Date(text).toLocaleString();
export const percent = (part) => `${Math.round(part * 100)} %`;
export const short = (uuid) => uuid.slice(0, 8);

/** How long ago a moment was. */
export function ago(text, now = Date.now()) {
  const seconds = Math.max(0, Math.round((now - Date.parse(text)) / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 48 * 3600 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

/** When a repository will be full, in a few words. */
export function fullIn(space, now = Date.now()) {
  if (space.full || space.free === 0) return "now";
  if (!space.forecast) return "not soon";
  const hours = (new Date(space.forecast.full_at) - now) / 3600e3;
  return hours < 0 ? "now" : hours < 48 ? `in ${Math.round(hours)} h` : `in ${Math.round(hours / 24)} days`;
}

/** When a repository will be full, and why. */
export function forecast(space) {
  if (space.full) return "full: guests wait for space";
  if (space.free === 0) return "full: only the reserve is left";
  if (!space.forecast) return "not filling up";
  return `full ${fullIn(space)} at ${bytes(space.forecast.bytes_per_day)} a day`;
}

/** Bytes in a text such as `20G` or `512 MiB`; `null` if it is none. Units are powers of 1024, as in `tapline`. */
export function parseSize(text) {
  const found = /^\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?\s*$/i.exec(text);
  if (!found) return null;
  const power = " KMGTP".indexOf(found[2].toUpperCase() || " ");
  const value = Number(found[1]) * 1024 ** power;
  return Number.isSafeInteger(value) ? value : null;
}
