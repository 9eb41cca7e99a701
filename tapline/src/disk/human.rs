//! Formats a disk's replies as lines for users. Fields that are missing are left out.

use control::answer::{
    Changes, Clone, Condition, InFlight, IoEngine, Layer, Layers, Limited, MapState, Merge, MergeLayers, MergeState,
    Pause, Paused, Polling, Resize, Revert, Server, Shape, Shared, Snapshot, Stats, Threads, Tracked, Upgrade, Version,
};
use control::size::readable;
use control::{SizeRule, printable};

/// Lines for `snapshot`.
pub fn snapshot(answer: &Snapshot) -> Vec<String> {
    let leaf = printable(&answer.leaf);
    let first = match &answer.copy {
        Some(copy) => format!("{} is a reflink copy of the disk; the disk continues in {leaf}", printable(copy)),
        None => format!("{leaf} is now the leaf, on {}", or(answer.parent.as_deref())),
    };
    vec![with_pause(first, answer.pause)]
}

/// Lines for `merge` and its status, pause, resume and cancel.
pub fn merge(answer: &Merge) -> Vec<String> {
    let MergeLayers { from, into } = answer.layers.unwrap_or(MergeLayers { from: 0, into: 0 });
    let state = match (answer.state, &answer.merged) {
        (MergeState::None, _) => return vec!["no merge is running, and none has run".into()],
        (MergeState::Failed | MergeState::Cancelled, _) => return not_merged(answer),
        (MergeState::Done, merged) => {
            let copied = readable(answer.copied.unwrap_or(0));
            let first = format!("merged layers {from} to {into}, {copied} copied");
            let Some(merged) = merged else { return vec![first] };
            let what = if merged.deleted { "removed" } else { "no longer used" };
            let files = merged.unused.iter().map(|file| format!("  {what}: {}", printable(file)));
            return std::iter::once(with_pause(first, Some(merged.pause))).chain(files).collect();
        }
        (MergeState::Beginning, _) => "beginning",
        (MergeState::Running, _) => "running",
        (MergeState::Paused, _) => "paused",
        (MergeState::Ending, _) => "ending",
        (MergeState::Removing, _) => "removing",
        (MergeState::Other, _) => "in a state that this version does not know",
    };
    let (done, len) = (readable(answer.done.unwrap_or(0)), readable(answer.len.unwrap_or(0)));
    vec![format!("merge of layers {from} to {into}: {state}, {done} of {len}")]
}

fn not_merged(answer: &Merge) -> Vec<String> {
    let ended = if answer.state == MergeState::Failed { "has failed" } else { "was cancelled" };
    let message = or(answer.error.as_ref().map(|error| error.message.as_str()));
    let advice = answer.error.as_ref().and_then(|error| error.advice.as_deref());
    let first = format!("the last merge {ended}: {message}");
    std::iter::once(first).chain(advice.map(|advice| format!("  {}", printable(advice)))).collect()
}

/// Lines for `shape`.
pub fn shape(answer: &Shape) -> Vec<String> {
    let auto = |rule| if rule == SizeRule::Auto { " (auto)" } else { "" };
    let split = answer.split_bytes.map_or_else(|| "none".into(), |bytes| format!("pieces of {}", readable(bytes)));
    let merge = answer.merge_bytes.map_or_else(|| "off".into(), |bytes| format!("up to {}", readable(bytes)));
    let mut lines =
        vec![format!("split: {split}{}", auto(answer.split)), format!("merge: {merge}{}", auto(answer.merge))];
    lines.extend(answer.policy.iter().flat_map(|policy| {
        let (name, device) = (policy.name(), printable(&policy.device));
        [
            format!("policy {}: {}", printable(&name), printable(&policy.why)),
            format!("  measured {} on {device}", policy.measured),
        ]
    }));
    let (splits, merges, redone) = (answer.splits, answer.merges, answer.redone);
    lines.push(format!("{splits} transfers split, {merges} merged, {redone} done again by themselves"));
    lines
}

/// Lines for `polling`.
pub fn polling(answer: &Polling) -> Vec<String> {
    let Polling { mode, max_us, hits, misses, polled_ns } = *answer;
    let polled = format!("{hits} polls found something, {misses} did not; {} in all", time(polled_ns / 1000));
    vec![format!("polling is {mode}, for at most {max_us} microseconds"), polled]
}

/// Lines for `threads`.
pub fn threads(answer: &Threads) -> Vec<String> {
    let Threads { most, lanes } = answer;
    let first = match most {
        1 => "the disk uses one thread".into(),
        most => format!("the disk may use {most} threads, and uses {} now", lanes.len() + 1),
    };
    std::iter::once(first).chain(of_lanes(lanes)).collect()
}

/// The number of operations of each lane, if there are any.
fn of_lanes(lanes: &[u64]) -> Option<String> {
    let each: Vec<String> = lanes.iter().map(u64::to_string).collect();
    (!lanes.is_empty()).then(|| format!("operations of its lanes: {}", each.join(", ")))
}

/// Lines for `revert`.
pub fn revert(answer: &Revert) -> Vec<String> {
    let unused = answer.unused.iter().map(|file| format!("  no longer used: {}", printable(file)));
    std::iter::once(format!("{} is now the leaf", printable(&answer.leaf))).chain(unused).collect()
}

/// Lines for `clone`.
pub fn clone(answer: &Clone) -> Vec<String> {
    let (work, sync) = (time(answer.took.work_us), time(answer.took.sync_us));
    let parents: String = answer.parents.iter().map(|parent| format!(" --parent {}", printable(parent))).collect();
    vec![
        format!("created {} in {work}, plus {sync} to sync", printable(&answer.image)),
        format!("  serve it with:{parents}"),
    ]
}

/// Lines for `resize`.
pub fn resize(answer: &Resize) -> Vec<String> {
    vec![with_pause(format!("the disk now has {}", readable(answer.size)), answer.pause)]
}

/// Lines for `space`.
pub fn space(answer: &Condition) -> Vec<String> {
    vec![match answer.waiting {
        0 => "no requests are waiting for space".into(),
        waiting => format!("retrying {waiting} requests that wait for space"),
    }]
}

/// Lines for `limit`.
pub fn limited(answer: &Limited) -> Vec<String> {
    let mut lines = vec![match answer.limits.is_none() {
        true => "the disk has no limits".into(),
        false => format!("limits: {}", answer.limits.shown()),
    }];
    if let Some(mean) = answer.throttled_ns.checked_div(answer.throttled) {
        let mean = time(mean / 1000);
        lines.push(format!("  {} requests have waited for a limit, {mean} each on average", answer.throttled));
    }
    if answer.waiting > 0 {
        lines.push(format!("  {} requests wait now", answer.waiting));
    }
    lines
}

/// Lines for `share`.
pub fn shared(answer: &Shared) -> Vec<String> {
    if !answer.shared {
        return vec!["the disk shares its storage with no other disk of Tapline".into()];
    }
    let others = match answer.others {
        0 => "no other disk uses the storage now".into(),
        1 => "1 other disk uses the storage now".into(),
        others => format!("{others} other disks use the storage now"),
    };
    let mut lines = vec![format!("weight {}, depth {}; {others}", answer.weight, answer.depth)];
    if let Some(mean) = answer.held_ns.checked_div(answer.held) {
        let mean = time(mean / 1000);
        lines.push(format!("  {} requests have waited for the disk's share, {mean} each on average", answer.held));
    }
    if answer.waiting > 0 {
        lines.push(format!("  {} requests wait now", answer.waiting));
    }
    lines
}

/// Lines for `pause` and `resume`.
pub fn paused(answer: &Paused) -> Vec<String> {
    vec![match answer.paused {
        true => "the disk is paused; `resume` continues it".into(),
        false => with_pause("the disk continues".into(), answer.pause),
    }]
}

/// Lines for `upgrade`.
pub fn upgrade(answer: &Upgrade) -> Vec<String> {
    let (pid, program, pause) = (answer.pid, or(answer.program.as_deref()), answer.pause_us);
    vec![format!("process {pid} now serves the disk, version {program}; the guest's requests waited {pause} µs")]
}

/// Lines for `layers`.
pub fn layers(answer: &Layers) -> Vec<String> {
    let engine = match answer.engine {
        Some(IoEngine::Uring) => ", by io_uring",
        Some(IoEngine::Aio) => ", by Linux AIO",
        Some(IoEngine::None) | None => "",
    };
    let mut lines = vec![format!("{} disk{engine}", readable(answer.size))];
    lines.extend(answer.layers.iter().flat_map(|found| std::iter::once(layer(found)).chain(server(found))));
    match answer.inflight {
        Some(InFlight::Recorded) => lines.push("the guest's front-end records requests in flight".into()),
        Some(InFlight::InOrder) => {
            lines.push("the guest's front-end does not record requests in flight: completing requests in order".into())
        }
        None => {}
    }
    lines.extend(answer.changes.iter().flat_map(changes));
    if answer.condition.broken {
        lines.push("a sync has FAILED: the disk does not write until it is restarted".into());
    }
    lines
}

/// A line about the connection of a layer at an NBD server.
fn server(layer: &Layer) -> Option<String> {
    let server = layer.server.as_ref()?;
    let kept = match server.kept {
        0 => String::new(),
        kept => format!("; {kept} writes are kept that are not flushed"),
    };
    Some(match server.away_ms {
        None => format!("     its server is connected{kept}"),
        Some(away) => format!("     its server is {}{kept}", away_in_words(away, server)),
    })
}

/// Since when and why a server is away.
pub fn away_in_words(away_ms: u64, server: &Server) -> String {
    let why = server.error.as_deref().map(|why| format!(": {}", printable(why))).unwrap_or_default();
    let attempts = match server.attempts {
        0 | 1 => String::new(),
        attempts => format!(" ({attempts} attempts to connect)"),
    };
    format!("AWAY for {}{attempts}{why}", time(away_ms.saturating_mul(1000)))
}

/// Lines for `track` and `untrack`.
pub fn tracked(answer: &Tracked) -> Vec<String> {
    let lines = answer.changes.iter().flat_map(changes).collect::<Vec<_>>();
    let mut lines = if lines.is_empty() { vec!["changed blocks are not recorded".into()] } else { lines };
    if let Some(first) = lines.first_mut() {
        *first = with_pause(std::mem::take(first), answer.pause);
    }
    lines
}

fn changes(changes: &Changes) -> Vec<String> {
    let (map, id) = (printable(&changes.map), printable(&changes.id));
    match changes.state {
        MapState::Kept => {
            let changed = readable(changes.changed.unwrap_or(0));
            let rest = if changes.at_rest { ", all of which is in the file" } else { "" };
            vec![format!("changed blocks are recorded in {map} (map {id}): {changed} so far{rest}")]
        }
        MapState::Invalid => vec![
            format!("changed blocks are NOT recorded any more: {map} (map {id}) misses changes, and is void"),
            "  the next backup must be a full one; track begins a new map".into(),
        ],
        MapState::Doubtful => vec![
            format!("{map} (map {id}) can be neither written nor made invalid: some writes WAIT"),
            "  remove that file, then use untrack --removed".into(),
        ],
        MapState::Other => vec![format!("{map} (map {id}) is in a state that this version does not know")],
    }
}

fn layer(layer: &Layer) -> String {
    let name = layer.name().map_or_else(|| "?".into(), |name| printable(&name.to_string()));
    let (size, allocated) = (readable(layer.size), readable(layer.allocated.unwrap_or(0)));
    let writable = if layer.writable { "writable" } else { "read-only" };
    format!("{:>3}  {name}  {size}, {allocated} allocated, {writable}", layer.layer)
}

/// Lines for `stats`.
pub fn stats(answer: &Stats) -> Vec<String> {
    let Stats { reads, writes, flushes, discards, .. } = answer;
    let kinds = [("reads", reads), ("writes", writes), ("flushes", flushes), ("discards", discards)];
    let line = |(kind, found): (&str, &control::answer::Counters)| {
        let mean = (found.sum_ns / 1000).checked_div(found.count).map(time);
        let mean = mean.map(|mean| format!(", {mean} each")).unwrap_or_default();
        format!("{kind}: {}, {}{mean}, {} in flight", found.count, readable(found.bytes), found.in_flight)
    };
    kinds.into_iter().map(line).chain(of_lanes(&answer.lanes)).collect()
}

/// Lines for `version`.
pub fn version(answer: &Version) -> Vec<String> {
    vec![format!("protocol version {}", answer.version)]
}

fn with_pause(line: String, pause: Option<Pause>) -> String {
    match pause {
        Some(Pause { pause_us: 0, held_us }) => {
            format!("{line}; the guest saw no pause (requests were held for {})", time(held_us))
        }
        Some(Pause { pause_us, .. }) => format!("{line}; the guest saw a pause of {}", time(pause_us)),
        None => line,
    }
}

fn time(us: u64) -> String {
    crate::unit::time(stats::float(us) * 1000.0)
}

fn or(text: Option<&str>) -> String {
    text.map_or_else(|| "?".into(), printable)
}

#[cfg(test)]
mod test {
    use control::ask::Method;

    use super::*;

    #[test]
    fn a_pause_is_shown_in_a_suitable_unit() {
        assert_eq!((time(999), time(1_234), time(2_500_000)), ("999 µs".into(), "1.2 ms".into(), "2.5 s".into()));
        let line = |pause_us| with_pause("done".into(), Some(Pause { pause_us, held_us: 20 }));
        assert_eq!(line(3100), "done; the guest saw a pause of 3.1 ms");
        assert!(line(0).contains("no pause"), "{}", line(0));
    }

    #[test]
    fn a_server_that_is_away_is_shown_below_its_layer() {
        let text = r#"{"layer":1,"format":"raw","path":"nbd://h/e","size":1048576,"allocated":null,"writable":false,
            "server":{"away_ms":2500,"error":"refused\u001b[2J","attempts":3,"kept":2}}"#;
        let mut layer: Layer = serde_json::from_str(text).unwrap();
        let line = server(&layer).unwrap();
        assert!(
            line.contains("AWAY for 2.5 s (3 attempts to connect): refused") && line.contains("2 writes"),
            "{line}"
        );
        assert!(!line.contains('\u{1b}'));
        layer.server = Some(Server { connected: true, ..Server::default() });
        assert_eq!(server(&layer).unwrap().trim(), "its server is connected");
    }

    #[test]
    fn a_disks_responses_cannot_control_a_terminal() {
        let (leaf, parent) = ("vhd:/a\u{1b}[2Jb".to_owned(), Some("vhd:/p".to_owned()));
        let (method, copy, layers) = (Method::Chain, None, Vec::new());
        let said = Snapshot { method, copy, leaf, parent, layers, took: None, pause: None };
        assert!(!snapshot(&said).concat().contains('\u{1b}'));
    }
}
