//! A disk's responses, for people. Missing fields are left out, and unknown fields are not shown.

use serde_json::Value;

use super::name_of;
use crate::cli::DiskVerb;
use crate::output::printable;
use crate::progress::Progress;
use crate::size::readable;

/// The answer to a verb, in lines.
pub fn answer(verb: &DiskVerb, answer: &Value) -> String {
    let lines = match verb {
        DiskVerb::Snapshot { .. } => snapshot(answer),
        DiskVerb::Merge { .. } | DiskVerb::MergeStatus | DiskVerb::MergePause => merge(answer),
        DiskVerb::MergeResume | DiskVerb::MergeCancel => merge(answer),
        DiskVerb::Revert { .. } => revert(answer),
        DiskVerb::Clone { .. } => clone(answer),
        DiskVerb::Resize { .. } => resize(answer),
        DiskVerb::Space => vec![match number(answer, "waiting") {
            0 => "no requests are waiting for space".into(),
            waiting => format!("retrying {waiting} requests that wait for space"),
        }],
        DiskVerb::Pause => vec!["the disk is paused; `resume` continues it".into()],
        DiskVerb::Resume => vec![with_pause("the disk continues".into(), answer)],
        DiskVerb::Upgrade { .. } => vec![format!(
            "process {} now serves the disk, version {}; the guest's requests waited {} µs",
            number(answer, "pid"),
            or(answer, "program"),
            number(answer, "pause_us")
        )],
        DiskVerb::Layers => layers(answer),
        DiskVerb::Stats => stats(answer),
        DiskVerb::Version => vec![format!("protocol version {}", number(answer, "version"))],
    };
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Shows how far a merge is.
pub fn show_progress(progress: &mut Option<(Progress, u64)>, event: &Value) {
    let (done, len) = (number(event, "done"), number(event, "len"));
    let (bar, before) = progress.get_or_insert_with(|| (Progress::new("merging", len), 0));
    bar.advance(done.saturating_sub(*before));
    *before = done.max(*before);
}

/// Ends the progress display.
pub fn end_progress((bar, _): (Progress, u64)) {
    bar.finish();
}

fn snapshot(answer: &Value) -> Vec<String> {
    let first = match text(answer, "copy") {
        Some(copy) => format!("{copy} is a reflink copy of the disk; the disk continues in {}", or(answer, "leaf")),
        None => format!("{} is now the leaf, on {}", or(answer, "leaf"), or(answer, "parent")),
    };
    vec![with_pause(first, answer)]
}

fn merge(answer: &Value) -> Vec<String> {
    let layers = format!("layers {} to {}", number(answer, "from"), number(answer, "into"));
    match text(answer, "state").as_deref() {
        Some("none") => vec!["no merge is running, and none has run".into()],
        Some(state @ ("failed" | "cancelled")) => {
            let error = answer.get("error").unwrap_or(&Value::Null);
            let ended = if state == "failed" { "has failed" } else { "was cancelled" };
            let mut lines = vec![format!("the last merge {ended}: {}", or(error, "message"))];
            lines.extend(text(error, "advice").map(|advice| format!("  {advice}")));
            lines
        }
        Some("done") => {
            let copied = readable(number(answer, "copied"));
            let mut lines = vec![with_pause(format!("merged {layers}, {copied} copied"), answer)];
            let what = if answer.get("deleted") == Some(&Value::Bool(true)) { "removed" } else { "no longer used" };
            lines.extend(list(answer, "unused").map(|file| format!("  {what}: {file}")));
            lines
        }
        Some(state) => {
            let (done, len) = (number(answer, "done"), number(answer, "len"));
            vec![format!("merge of {layers}: {state}, {} of {}", readable(done), readable(len))]
        }
        None => vec!["the disk did not report a merge state".into()],
    }
}

fn revert(answer: &Value) -> Vec<String> {
    let mut lines = vec![format!("{} is now the leaf", or(answer, "leaf"))];
    lines.extend(list(answer, "unused").map(|file| format!("  no longer used: {file}")));
    lines
}

fn clone(answer: &Value) -> Vec<String> {
    let (work, sync) = (number(answer, "work_us"), number(answer, "sync_us"));
    let mut lines = vec![format!("created {} in {}, plus {} to sync", or(answer, "image"), time(work), time(sync))];
    let parents: String = list(answer, "parents").map(|parent| format!(" --parent {parent}")).collect();
    lines.push(format!("  serve it with:{parents}"));
    lines
}

fn resize(answer: &Value) -> Vec<String> {
    vec![with_pause(format!("the disk now has {}", readable(number(answer, "size"))), answer)]
}

fn layers(answer: &Value) -> Vec<String> {
    let mut lines = vec![format!("{} disk", readable(number(answer, "size")))];
    for layer in answer.get("layers").and_then(Value::as_array).into_iter().flatten() {
        lines.push(format!(
            "{:>3}  {}  {}, {} allocated, {}",
            number(layer, "layer"),
            name_of(layer).map_or_else(|| "?".into(), |name| printable(&name.to_string())),
            readable(number(layer, "size")),
            readable(number(layer, "allocated")),
            if layer.get("writable") == Some(&Value::Bool(true)) { "writable" } else { "read-only" },
        ));
    }
    match text(answer, "inflight").as_deref() {
        Some("recorded") => lines.push("the guest's front-end records requests in flight".into()),
        Some(_) => {
            lines.push("the guest's front-end does not record requests in flight: completing requests in order".into())
        }
        None => {}
    }
    if answer.get("broken") == Some(&Value::Bool(true)) {
        lines.push("a sync has FAILED: the disk does not write until it is restarted".into());
    }
    lines
}

fn stats(answer: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for kind in ["reads", "writes", "flushes", "discards"] {
        let Some(found) = answer.get(kind) else { continue };
        let (count, bytes) = (number(found, "count"), number(found, "bytes"));
        let mean = (number(found, "sum_ns") / 1000).checked_div(count).map(time);
        let mean = mean.map(|mean| format!(", {mean} each")).unwrap_or_default();
        let (size, under_way) = (readable(bytes), number(found, "in_flight"));
        lines.push(format!("{kind}: {count}, {size}{mean}, {under_way} in flight"));
    }
    lines
}

fn with_pause(line: String, answer: &Value) -> String {
    match (answer.get("pause_us").and_then(Value::as_u64), answer.get("held_us").and_then(Value::as_u64)) {
        (Some(0), Some(held)) => format!("{line}; the guest saw no pause (requests were held for {})", time(held)),
        (Some(pause), _) => format!("{line}; the guest saw a pause of {}", time(pause)),
        _ => line,
    }
}

fn time(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{}.{} ms", us / 1_000, us % 1_000 / 100),
        _ => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
    }
}

fn number(value: &Value, field: &str) -> u64 {
    value.get(field).and_then(Value::as_u64).unwrap_or(0)
}

fn text(value: &Value, field: &str) -> Option<String> {
    value.get(field).and_then(Value::as_str).map(printable)
}

fn or(value: &Value, field: &str) -> String {
    text(value, field).unwrap_or_else(|| "?".into())
}

fn list<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = String> + use<'a> {
    value.get(field).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).map(printable)
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pause_is_shown_in_a_suitable_unit() {
        assert_eq!((time(999), time(1_234), time(2_500_000)), ("999 us".into(), "1.2 ms".into(), "2.5 s".into()));
        let line = with_pause("done".into(), &json!({ "pause_us": 3100, "held_us": 2000 }));
        assert_eq!(line, "done; the guest saw a pause of 3.1 ms");
        let none = with_pause("done".into(), &json!({ "pause_us": 0, "held_us": 20 }));
        assert!(none.contains("no pause"), "{none}");
    }

    #[test]
    fn a_disks_responses_cannot_control_a_terminal() {
        let said = json!({ "leaf": "vhd:/a\u{1b}[2Jb", "parent": "vhd:/p", "method": "chain" });
        let verb = DiskVerb::Snapshot { to: "vhd:/x".parse().unwrap(), method: crate::cli::SnapshotMethod::Auto };
        assert!(!answer(&verb, &said).contains('\u{1b}'));
    }

    #[test]
    fn an_empty_answer_can_be_shown() {
        for verb in [DiskVerb::Layers, DiskVerb::Stats, DiskVerb::MergeStatus, DiskVerb::Version, DiskVerb::Resume] {
            answer(&verb, &json!({}));
        }
    }
}
