//! Formats a trace as tables for users and as JSON.

use control::size::readable;
use serde_json::{Value, json};
use stats::{Record, Stage, float};

use super::group::Group;
use crate::unit::time;
use crate::wrap::wrapped;

/// The width of the tables.
const WIDTH: usize = 80;

/// Formats two tables of at most 80 columns: the stages of each kind and size of request, and their durations.
pub fn text(groups: &[Group], warm_up: &[&Record], lost: u64) -> String {
    let mut out = String::new();
    if groups.is_empty() {
        out.push_str("no requests were answered in this time\n");
    } else {
        stages(&mut out, groups);
        out.push('\n');
        durations(&mut out, groups);
        let note = "stages and TYPICAL are means without the fastest and the slowest fifth";
        out.push_str(&wrapped("", note, WIDTH));
    }
    if !warm_up.is_empty() {
        let sum: f64 = warm_up.iter().map(|record| float(record.whole())).sum();
        let mean = time(sum / float(warm_up.len() as u64));
        out.push_str(&format!("warm-up, not counted above: {} requests, mean {mean}\n", warm_up.len()));
    }
    if lost > 0 {
        out.push_str(&format!("{lost} requests came faster than they could be read, and are not counted\n"));
    }
    out
}

fn stages(out: &mut String, groups: &[Group]) {
    let heads: String = Stage::ALL.iter().map(|stage| format!(" {:>7}", head(*stage))).collect();
    line(out, format!("{:12} {:>7}{heads}", "OPERATION", "SIZE"));
    for group in groups {
        let stages: String = group.stages.iter().map(|ns| format!(" {:>7}", time(*ns))).collect();
        line(out, format!("{:12} {:>7}{stages}", group.kind.name(), readable(group.len)));
    }
}

fn durations(out: &mut String, groups: &[Group]) {
    let heads = ["TYPICAL", "MEAN", "P50", "P99", "MAX"].map(|head| format!(" {head:>7}")).concat();
    line(out, format!("{:12} {:>7} {:>8}{heads}", "OPERATION", "SIZE", "COUNT"));
    for group in groups {
        let all = [group.typical(), group.mean, float(group.p50), float(group.p99), float(group.longest)];
        let all = all.map(|ns| format!(" {:>7}", time(ns))).concat();
        let failed = if group.failed > 0 { format!("  {} failed", group.failed) } else { String::new() };
        line(out, format!("{:12} {:>7} {:>8}{all}{failed}", group.kind.name(), readable(group.len), group.count));
    }
}

fn line(out: &mut String, text: String) {
    out.push_str(text.trim_end());
    out.push('\n');
}

/// The heading of a stage, at most seven characters.
fn head(stage: Stage) -> &'static str {
    if stage == Stage::Completion { "complet" } else { stage.name() }
}

/// The groups as one line of JSON; durations are in nanoseconds.
pub fn json(groups: &[Group], warm_up: &[&Record], lost: u64) -> String {
    let groups: Vec<Value> = groups
        .iter()
        .map(|group| {
            let stages = Stage::ALL.iter().zip(group.stages).map(|(stage, ns)| (stage.name().to_owned(), json!(ns)));
            json!({
                "operation": group.kind.name(),
                "size": group.len,
                "count": group.count,
                "failed": group.failed,
                "stages_ns": stages.collect::<serde_json::Map<_, _>>(),
                "typical_ns": group.typical(),
                "mean_ns": group.mean,
                "p50_ns": group.p50,
                "p99_ns": group.p99,
                "max_ns": group.longest,
            })
        })
        .collect();
    format!("{}\n", json!({ "groups": groups, "warm_up": warm_up.len(), "lost": lost }))
}

#[cfg(test)]
mod test {
    use stats::Kind;

    use super::super::group::test::record;
    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_kind_and_size() {
        let records: Vec<Record> = (0..10).map(|number| record(number, Kind::Read, 4096, 10_000)).collect();
        let warm = [&records[0]];
        let shown = text(&Group::of(records.iter()), &warm, 3);
        let expected = "\
OPERATION       SIZE    ring     map   split   queue storage complet  notify
read           4 KiB  100 ns  200 ns    0 ns    0 ns 10.0 µs  300 ns  400 ns

OPERATION       SIZE    COUNT TYPICAL    MEAN     P50     P99     MAX
read           4 KiB       10 11.0 µs 11.0 µs 11.0 µs 11.0 µs 11.0 µs
stages and TYPICAL are means without the fastest and the slowest fifth
warm-up, not counted above: 1 requests, mean 11.0 µs
3 requests came faster than they could be read, and are not counted
";
        assert_eq!(shown, expected);
        let json: Value = serde_json::from_str(&json(&Group::of(records.iter()), &warm, 3)).unwrap();
        assert_eq!((&json["groups"][0]["stages_ns"]["storage"], &json["lost"]), (&json!(10_000.0), &json!(3)));
        assert!(text(&[], &[], 0).contains("no requests"));
    }
}
