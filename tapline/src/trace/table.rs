//! What was traced, as a table for people and as JSON.

use std::fmt::Write;

use control::size::readable;
use serde_json::{Value, json};
use stats::{Record, Stage, float};

use super::group::Group;

/// The table. Durations are in microseconds.
pub fn text(groups: &[Group], warm_up: &[&Record], lost: u64) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let mut line = |text: String| writeln!(out, "{text}").unwrap_or_default();
    if groups.is_empty() {
        line("no requests were answered in this time".into());
    } else {
        let stages: String = Stage::ALL.iter().map(|stage| format!("{:>11}", stage.name())).collect();
        line(format!(
            "{:12} {:>8} {:>8} {stages}{:>9} {:>9} {:>9} {:>9} {:>9}",
            "OPERATION", "SIZE", "COUNT", "TYPICAL", "MEAN", "P50", "P99", "MAX"
        ));
        for group in groups {
            let stages: String = group.stages.iter().map(|ns| format!("{:>11.1}", ns / 1000.0)).collect();
            let us = |ns: f64| ns / 1000.0;
            line(format!(
                "{:12} {:>8} {:>8} {stages}{:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1}{}",
                group.kind.name(),
                readable(group.len),
                group.count,
                us(group.typical()),
                us(group.mean),
                us(float(group.p50)),
                us(float(group.p99)),
                us(float(group.longest)),
                if group.failed > 0 { format!("  {} failed", group.failed) } else { String::new() },
            ));
        }
        line("microseconds; stages and TYPICAL are means without the fastest and the slowest fifth".into());
    }
    if !warm_up.is_empty() {
        let sum: f64 = warm_up.iter().map(|record| float(record.whole())).sum();
        let mean = sum / float(warm_up.len() as u64) / 1000.0;
        line(format!("warm-up, not counted above: {} requests, mean {mean:.1}", warm_up.len()));
    }
    if lost > 0 {
        line(format!("{lost} requests came faster than they could be read, and are not counted"));
    }
    out
}

/// The same as one line of JSON.
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
OPERATION        SIZE    COUNT        ring        map      split      queue    storage completion     notify  TYPICAL      MEAN       P50       P99       MAX
read            4 KiB       10         0.1        0.2        0.0        0.0       10.0        0.3        0.4     11.0      11.0      11.0      11.0      11.0
microseconds; stages and TYPICAL are means without the fastest and the slowest fifth
warm-up, not counted above: 1 requests, mean 11.0
3 requests came faster than they could be read, and are not counted
";
        assert_eq!(shown, expected);
        let json: Value = serde_json::from_str(&json(&Group::of(records.iter()), &warm, 3)).unwrap();
        assert_eq!((&json["groups"][0]["stages_ns"]["storage"], &json["lost"]), (&json!(10_000.0), &json!(3)));
        assert!(text(&[], &[], 0).contains("no requests"));
    }
}
