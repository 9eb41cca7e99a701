//! Formats repositories, and the results of probes and scans.

use std::fmt::Write;

use api::{HealthState, Problem, Scan, SizeRule, Space, Sr, SrFound, SrSource, Vdi};
use control::size::readable;
use jiff::Timestamp;

use super::calibrate::summary;
use crate::column::Column;
use crate::health;
use crate::label;
use crate::word;

type SrColumn = Column<Sr>;
type ProbeColumn = Column<SrFound>;

/// Columns of a repository.
pub const COLUMNS: &[SrColumn] = &[
    SrColumn::new("uuid", |sr, uuids| uuids.show(sr.uuid)),
    SrColumn::new("name", |sr, _| sr.name.to_string()),
    SrColumn::new("state", |sr, _| health::instead_of(word::of(&sr.state), &sr.health)),
    SrColumn::new("virtual", |sr, _| of_space(sr, |space| readable(space.virtual_allocation))).right().if_room(),
    SrColumn::new("used", |sr, _| of_space_now(sr, |space| readable(space.physical_utilisation))).right().if_room(),
    SrColumn::new("free", |sr, _| of_space_now(sr, |space| readable(space.free))).right(),
    SrColumn::new("overcommit", |sr, _| of_space(sr, overcommit)).right().if_room(),
    SrColumn::new("full in", |sr, _| of_space(sr, |space| full_in(space, Timestamp::now()))).right().if_room(),
    SrColumn::new("size", |sr, _| of_space(sr, |space| readable(space.physical_size))).right().if_room(),
    SrColumn::new("location", |sr, _| location(&sr.source)).if_room(),
    SrColumn::new("full", |sr, _| of_space(sr, full)).alone(),
    SrColumn::new("images", |sr, _| of_space(sr, |space| readable(space.images))).right().wide(),
    SrColumn::new("reserve", |sr, _| readable(sr.reserve)).right().wide(),
    SrColumn::new("share depth", |sr, _| sr.share_depth.to_string()).right().wide(),
    SrColumn::new("split", |sr, _| rule(sr.split)).right().wide(),
    SrColumn::new("merge", |sr, _| rule(sr.merge)).right().wide(),
    SrColumn::new("policy", |sr, _| sr.policy.as_ref().map(summary).unwrap_or_default()).alone(),
    SrColumn::new("policy problem", |sr, _| {
        sr.policy_in_force().err().map(|problem| in_words(&problem)).unwrap_or_default()
    })
    .alone(),
    SrColumn::new("device", |sr, _| {
        let device = sr.variant.as_ref().and_then(|variant| variant.device.as_ref());
        device.map(|device| device.name.clone()).unwrap_or_default()
    })
    .alone(),
    SrColumn::new("filesystem", |sr, _| {
        sr.variant.as_ref().map(|variant| variant.filesystem.clone()).unwrap_or_default()
    })
    .wide(),
    SrColumn::new("versions", |sr, _| {
        sr.variant.as_ref().map(|variant| word::of(&variant.versions)).unwrap_or_default()
    })
    .wide(),
    SrColumn::new("format", |sr, _| sr.variant.as_ref().map(|variant| variant.format.to_string()).unwrap_or_default())
        .wide(),
    SrColumn::new("formats", |sr, _| {
        let formats = sr.variant.iter().flat_map(|variant| &variant.formats).map(ToString::to_string);
        formats.collect::<Vec<_>>().join(", ")
    })
    .alone(),
    SrColumn::new("tags", |sr, _| label::shown(&sr.tags)).wide(),
    SrColumn::new("other config", |sr, _| label::lines(&sr.other_config)).alone(),
    SrColumn::new("read-only", |sr, _| {
        sr.variant.as_ref().map(|variant| variant.read_only.to_string()).unwrap_or_default()
    })
    .alone(),
    SrColumn::new("path", |sr, _| sr.variant.as_ref().map(|variant| variant.path.to_string()).unwrap_or_default())
        .alone(),
    SrColumn::new("notes", |sr, _| sr.variant.as_ref().map(|variant| variant.notes.join("\n")).unwrap_or_default())
        .alone(),
    SrColumn::new("measured", |sr, _| of_space(sr, |space| format!("{:.0}", space.measured))).alone(),
    SrColumn::new("health", |sr, _| health::in_words(&sr.health, Timestamp::now())).alone(),
    SrColumn::new("reason", |sr, _| sr.health.reason.clone().unwrap_or_default()).alone(),
    SrColumn::new("advice", |sr, _| sr.health.advice.clone().unwrap_or_default()).alone(),
    SrColumn::new("created", |sr, _| format!("{:.0}", sr.created)).alone(),
    SrColumn::new("description", |sr, _| sr.description.to_string()).alone(),
];

/// Columns of a repository found by a probe.
pub const FOUND: &[ProbeColumn] = &[
    ProbeColumn::new("uuid", |found, uuids| uuids.show(found.uuid)),
    ProbeColumn::new("name", |found, _| found.name.to_string()),
    ProbeColumn::new("known", |found, _| found.known.to_string()),
    ProbeColumn::new("images", |found, _| found.images.to_string()).right(),
];

/// Formats a rule for sizes.
fn rule(rule: SizeRule) -> String {
    match rule {
        SizeRule::Bytes(bytes) => readable(bytes),
        rule => rule.to_string(),
    }
}

fn in_words(problem: &Problem) -> String {
    match &problem.advice {
        Some(advice) => format!("{}; {advice}", problem.detail),
        None => problem.detail.clone(),
    }
}

/// Formats a property of the measured space; empty if it was never measured.
fn of_space(sr: &Sr, show: impl Fn(&Space) -> String) -> String {
    sr.space.as_ref().map(show).unwrap_or_default()
}

/// As [`of_space`], for values that change constantly: unknown while the storage is missing or does not respond.
fn of_space_now(sr: &Sr, show: impl Fn(&Space) -> String) -> String {
    match sr.health.state {
        HealthState::Unreachable | HealthState::Stuck => "unknown".to_owned(),
        _ => of_space(sr, show),
    }
}

/// The size of all disks as a multiple of the repository's size.
fn overcommit(space: &Space) -> String {
    let tenths = (u128::from(space.virtual_allocation) * 10).checked_div(space.physical_size.into());
    tenths.map(|tenths| format!("{}.{}x", tenths / 10, tenths % 10)).unwrap_or_default()
}

/// The time until the space is used up at the current rate.
fn full_in(space: &Space, now: Timestamp) -> String {
    if space.full {
        return "now".into();
    }
    let Some(forecast) = &space.forecast else { return "-".into() };
    let minutes = forecast.full_at.as_second().saturating_sub(now.as_second()).max(0) / 60;
    match (minutes / 60, minutes / 1440) {
        (0, _) if minutes == 0 => "now".into(),
        (0, _) => format!("{minutes} min"),
        (hours, 0 | 1) => format!("{hours} h"),
        (_, days) => format!("{days} d"),
    }
}

/// Whether the repository is full, or when it will be at the current rate.
fn full(space: &Space) -> String {
    match (space.full, &space.forecast) {
        (true, _) => "now; guests are waiting".into(),
        (false, Some(forecast)) => format!("{:.0}, at {} per day", forecast.full_at, readable(forecast.bytes_per_day)),
        (false, None) => String::new(),
    }
}

/// The location in command-line syntax.
pub fn location(source: &SrSource) -> String {
    match source {
        SrSource::Dir { path } => path.to_string(),
        SrSource::Nfs { server, export, .. } => format!("{server}:{export}"),
        SrSource::Smb { server, share, .. } => format!("//{server}/{share}"),
        SrSource::Iso { path } => format!("{path} (ISO images)"),
    }
}

/// Formats the result of a scan: one line per finding, then a summary.
pub fn scanned(scan: &Scan, vdis: &[Vdi]) -> String {
    let mut text = String::new();
    let mut line = |head: &str, what: String| {
        // Writing to a string cannot fail.
        writeln!(text, "{head:>9}  {what}").unwrap_or_default();
    };
    for placed in &scan.appeared {
        let what = match (placed.vdi, vdis.iter().find(|vdi| Some(vdi.uuid) == placed.vdi)) {
            (None, _) => "hidden; left unchanged".into(),
            (Some(uuid), None) => format!("vdi {uuid}"),
            (Some(uuid), Some(vdi)) => {
                let read_only = if vdi.read_only { ", read-only" } else { "" };
                let size = readable(vdi.size);
                format!("disk \"{}\" ({uuid}), {} of {size}{read_only}", vdi.name, word::of(&vdi.format))
            }
        };
        line("appeared", format!("{}: {what}", placed.file));
    }
    for vdi in &scan.missing {
        line("missing", format!("vdi {vdi}"));
    }
    for vdi in &scan.returned {
        line("returned", format!("vdi {vdi}"));
    }
    for unplaced in &scan.unplaced {
        let advice = unplaced.problem.advice.as_ref().map(|advice| format!("; {advice}")).unwrap_or_default();
        line("unplaced", format!("{}: {}{advice}", unplaced.file, unplaced.problem));
    }
    let counts = scan.counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ");
    line("files", if counts.is_empty() { "none".into() } else { counts });
    text
}

#[cfg(test)]
mod test {
    use api::{Code, Placed, Problem, Unplaced};
    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_time_until_a_repository_is_full_is_rounded_down() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let space = |full_at: Option<i64>, full| Space {
            physical_size: 100,
            physical_utilisation: 0,
            free: 0,
            images: 0,
            virtual_allocation: 149,
            full,
            forecast: full_at.map(|second| api::Forecast { full_at: at(second), bytes_per_day: 1, watched_seconds: 1 }),
            measured: at(0),
        };
        let shown = |full_at| full_in(&space(Some(full_at), false), at(0));
        assert_eq!([-5, 59, 60, 3599].map(shown), ["now", "now", "1 min", "59 min"]);
        assert_eq!([3600, 2 * 86_400 - 1, 2 * 86_400, 4 * 86_400 - 1].map(shown), ["1 h", "47 h", "2 d", "3 d"]);
        assert_eq!(
            (full_in(&space(None, false), at(0)), full_in(&space(None, true), at(0))),
            ("-".into(), "now".into())
        );
        assert_eq!(overcommit(&space(None, false)), "1.4x");
        assert_eq!(overcommit(&Space { physical_size: 0, ..space(None, false) }), "");
    }

    #[test]
    fn a_scan_result_is_shown_line_by_line() {
        let problem = Problem::new(Code::Invalid, "its parent is not here").advise("import it with its parent");
        let scan = Scan {
            appeared: vec![Placed { file: "a.vhd".into(), vdi: None }],
            missing: vec![Uuid::nil()],
            returned: Vec::new(),
            unplaced: vec![Unplaced { file: "b.vhd".into(), problem }],
            counts: [("images".to_owned(), 7), ("notes".to_owned(), 1)].into(),
        };
        let text = " appeared  a.vhd: hidden; left unchanged\n  missing  vdi 00000000-0000-0000-0000-000000000000\n \
                    unplaced  b.vhd: its parent is not here; import it with its parent\n    files  7 images, 1 notes\n";
        assert_eq!(scanned(&scan, &[]), text);
    }
}
