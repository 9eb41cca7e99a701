//! Writes requests and their stages as a Chrome trace: the JSON that chrome://tracing and Perfetto read ("Trace Event
//! Format").

use std::io::{self, Write};

use serde_json::json;
use stats::{Record, Stage, float};

/// Writes the requests. Overlapping requests are put on different lanes.
pub fn write(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let mut all: Vec<&Record> = records.iter().collect();
    all.sort_by_key(|record| record.seen);
    let begun = all.first().map_or(0, |record| record.seen);
    // Times at which the lanes are free again.
    let mut lanes: Vec<u64> = Vec::new();
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut first = true;
    for record in all {
        let end = record.seen.saturating_add(record.whole());
        let lane = match lanes.iter().position(|free| *free <= record.seen) {
            Some(lane) => lane,
            None => {
                lanes.push(0);
                lanes.len() - 1
            }
        };
        if let Some(free) = lanes.get_mut(lane) {
            *free = end;
        }
        let us = |ns: u64| float(ns) / 1000.0;
        let name = format!("{} {} at {}", record.kind.name(), record.len, record.at);
        let mut event = |name: &str, from: u64, ns: u64| {
            let comma = if std::mem::take(&mut first) { "" } else { "," };
            let event = json!({
                "name": name, "cat": record.kind.name(), "ph": "X", "ts": us(from - begun), "dur": us(ns), "pid": 1,
                "tid": lane + 1, "args": { "number": record.number, "outcome": record.outcome.name() },
            });
            write!(out, "{comma}\n{event}")
        };
        event(&name, record.seen, record.whole())?;
        let mut at = record.seen;
        for (stage, ns) in Stage::ALL.iter().zip(record.stages).filter(|(_, ns)| *ns > 0) {
            event(stage.name(), at, ns)?;
            at += ns;
        }
    }
    writeln!(out, "\n]}}")
}

#[cfg(test)]
mod test {
    use serde_json::Value;
    use stats::Kind;

    use super::super::group::test::record;
    use super::*;

    #[test]
    fn requests_that_overlap_are_on_different_lanes_and_stages_follow_each_other() {
        let mut records = vec![record(0, Kind::Read, 4096, 10_000), record(1, Kind::Write, 512, 10_000)];
        records[1].seen = records[0].seen + 5000;
        let mut out = Vec::new();
        write(&mut out, &records).unwrap();
        let value: Value = serde_json::from_slice(&out).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 2 * (1 + 5), "the whole, and five stages that took time");
        assert_eq!((&events[0]["tid"], &events[6]["tid"]), (&json!(1), &json!(2)));
        let number = |event: &Value, field: &str| event[field].as_f64().unwrap();
        for pair in events[1..6].windows(2) {
            let end = number(&pair[0], "ts") + number(&pair[0], "dur");
            assert!((end - number(&pair[1], "ts")).abs() < 1e-6);
        }
        let mut none = Vec::new();
        write(&mut none, &[]).unwrap();
        serde_json::from_slice::<Value>(&none).unwrap();
    }
}
