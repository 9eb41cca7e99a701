//! An inventory survives whatever is done to its file: what is read is a state that was written, or it is refused.

use std::collections::VecDeque;
use std::fs;

use api::{Code, ImageFormat};
use jiff::Timestamp;

use super::*;
use crate::driver::Directory;

struct Room {
    place: tempfile::TempDir,
    directory: Directory,
    sr: Uuid,
}

fn room() -> Room {
    let place = tempfile::tempdir().unwrap();
    let directory = Directory::open(&place.path().to_str().unwrap().parse().unwrap()).unwrap();
    Room { place, directory, sr: Uuid::new_v4() }
}

impl Room {
    fn read(&self) -> (Log, Contents) {
        match read(&self.directory, self.sr).unwrap() {
            Read::Whole(log, contents) => (*log, *contents),
            other => panic!("{other:?}"),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.place.path().join(INVENTORY)).unwrap()
    }

    fn put(&self, bytes: &[u8]) {
        fs::write(self.place.path().join(INVENTORY), bytes).unwrap();
    }
}

fn image(n: u128, parent: Option<u128>) -> InventoryImage {
    InventoryImage {
        uuid: Uuid::from_u128(n),
        file: format!("{n}.qcow2"),
        format: ImageFormat::Qcow2,
        size: 1 << 30,
        parent: parent.map(Uuid::from_u128),
        damaged: false,
        diverged: false,
        no_data: false,
        kept: false,
    }
}

fn vdi(n: u128, image: u128) -> InventoryVdi {
    InventoryVdi {
        uuid: Uuid::from_u128(1000 + n),
        image: Uuid::from_u128(image),
        name: format!("disk {n}").parse().unwrap(),
        description: Description::default(),
        tags: Default::default(),
        other_config: Default::default(),
        read_only: false,
        snapshot_of: None,
        retention: None,
        scheduled: false,
        for_backup: false,
        cbt: None,
        logical_block_size: None,
        snapshot_time: None,
        created: Timestamp::UNIX_EPOCH,
    }
}

fn words() -> Words {
    Words {
        name: "vms".parse().unwrap(),
        description: Description::default(),
        tags: Default::default(),
        other_config: Default::default(),
    }
}

/// A disk, a snapshot of it, the snapshot gone and its image merged away: a line each; the states before, between and
/// after.
fn history() -> (Contents, Vec<Vec<Change>>) {
    let mut first = Contents::new(words());
    first.apply(Change::Image(image(1, None)));
    first.apply(Change::Vdi(vdi(1, 1)));
    let snapshot = vec![
        Change::Image(image(2, Some(1))),
        Change::Vdi(InventoryVdi { read_only: true, snapshot_of: Some(Uuid::from_u128(1001)), ..vdi(2, 1) }),
        Change::Vdi(vdi(1, 2)),
    ];
    let gone = vec![Change::Gone(Gone::Vdi(Uuid::from_u128(1002)))];
    let merged = vec![Change::Vdi(vdi(1, 1)), Change::Gone(Gone::Image(Uuid::from_u128(2)))];
    (first, vec![snapshot, gone, merged])
}

/// Writes the history; all states by generation.
fn written(room: &Room) -> (Log, Vec<Contents>) {
    let (first, changes) = history();
    let begun = (7, first_head());
    let mut log = Log::write(&room.directory, room.sr, begun, &first, VecDeque::new()).unwrap();
    let mut states = vec![first];
    for changes in changes {
        let line = Line::new(log.generation + 1, log.head.clone(), changes.clone()).unwrap();
        log.append(&room.directory, room.sr, &[line]).unwrap();
        let mut state = states.last().unwrap().clone();
        changes.into_iter().for_each(|change| state.apply(change));
        states.push(state);
    }
    (log, states)
}

/// Reads what is left: the result must be a state that was written, with its head, or a refusal.
fn a_state_or_a_refusal(room: &Room, log: &Log, states: &[Contents]) -> Option<u64> {
    match read(&room.directory, room.sr) {
        Ok(Read::Whole(found, contents)) => {
            assert!(log.has_been_at(found.generation, &found.head));
            let at = usize::try_from(found.generation - 7).unwrap();
            assert_eq!(Some(&*contents), states.get(at));
            Some(found.generation)
        }
        Ok(Read::Damaged(damage)) => {
            assert!(damage.why.advice.is_some());
            None
        }
        Ok(Read::Absent) => panic!("it is there"),
        Err(problem) => {
            assert!(problem.advice.is_some() && problem.code != Code::Internal, "{problem:?}");
            None
        }
    }
}

#[test]
fn truncated_anywhere_an_inventory_is_an_earlier_state_or_refused() {
    let room = room();
    let (log, states) = written(&room);
    let bytes = room.bytes();
    assert_eq!(a_state_or_a_refusal(&room, &log, &states), Some(10));
    let mut seen = HashSet::new();
    for len in 0..bytes.len() {
        room.put(&bytes[..len]);
        seen.extend(a_state_or_a_refusal(&room, &log, &states));
    }
    assert_eq!(seen, HashSet::from([7, 8, 9]));
}

#[test]
fn with_any_byte_changed_an_inventory_is_an_earlier_state_or_refused() {
    let room = room();
    let (log, states) = written(&room);
    let bytes = room.bytes();
    let last = bytes.len() - 1;
    for at in 0..bytes.len() {
        for change in [1, 0x20, 0x80, bytes[at] ^ b'\n', bytes[at]] {
            let mut changed = bytes.clone();
            changed[at] ^= change;
            if changed == bytes {
                continue;
            }
            room.put(&changed);
            let read = a_state_or_a_refusal(&room, &log, &states);
            // Without its line end, the last line may be an incomplete write.
            assert!(read.is_none() || at == last, "byte {at}: {read:?}");
        }
    }
}

#[test]
fn a_truncated_line_is_appended_again_and_a_killed_rewrite_discarded() {
    let room = room();
    let (_, states) = written(&room);
    let bytes = room.bytes();
    fs::write(room.place.path().join(format!("{INVENTORY}.unfinished")), "{").unwrap();
    room.put(&bytes[..bytes.len() - 5]);
    let (mut log, contents) = room.read();
    assert_eq!((log.generation, &contents), (9, &states[2]));
    let (_, changes) = history();
    let line = Line::new(10, log.head.clone(), changes[2].clone()).unwrap();
    // Appending an existing line has no effect.
    let old = Line::new(9, first_head(), changes[1].clone()).unwrap();
    log.append(&room.directory, room.sr, &[old, line]).unwrap();
    assert_eq!(room.read().1, states[3]);
    let (found, contents) = room.read();
    let head = (found.generation, found.head.clone());
    Log::write(&room.directory, room.sr, head, &contents, found.history()).unwrap();
    assert_eq!(fs::read_dir(room.place.path()).unwrap().count(), 1);
    let (again, contents) = room.read();
    assert_eq!((again.generation, &again.head, contents), (10, &found.head, states[3].clone()));
    assert!((7..=10).all(|at| again.history().iter().any(|(known, _)| *known == at)));
}

#[test]
fn a_line_that_does_not_follow_is_not_appended() {
    let room = room();
    let (mut log, _) = written(&room);
    let bytes = room.bytes();
    for line in [Line::new(12, log.head.clone(), Vec::new()), Line::new(11, first_head(), Vec::new())] {
        log.append(&room.directory, room.sr, &[line.unwrap()]).unwrap_err();
    }
    assert!(log.is_doubtful());
    assert_eq!(room.bytes(), bytes);
}

#[test]
fn an_inventory_is_compacted_with_its_history() {
    let room = room();
    let (mut log, _) = written(&room);
    let text: Description = "x".repeat(4000).parse().unwrap();
    let (mut longest, mut shortest) = (0, u64::MAX);
    for n in 0..1200 {
        let words = Words { description: text.clone(), ..words() };
        let line = Line::new(log.generation + 1, log.head.clone(), vec![Change::Sr(words)]).unwrap();
        log.append(&room.directory, room.sr, &[line]).unwrap();
        let len = u64::try_from(room.bytes().len()).unwrap();
        longest = longest.max(len);
        if n > 600 {
            shortest = shortest.min(len);
        }
    }
    assert!(longest < 3 << 20 && shortest < 200 << 10, "{longest} {shortest}");
    let (found, _) = room.read();
    assert_eq!((found.generation, &found.head), (log.generation, &log.head));
    let known = found.history().iter().filter(|(at, head)| log.has_been_at(*at, head)).count();
    assert!(known >= 1000, "{known}");
}

/// The catalogue could not count on from there.
#[test]
fn an_impossibly_high_generation_is_damage() {
    for generation in [u64::MAX, 1 << 63, (1 << 63) - 1] {
        let room = room();
        let head = (generation, first_head());
        Log::write(&room.directory, room.sr, head, &Contents::new(words()), VecDeque::new()).unwrap();
        let Read::Damaged(damage) = read(&room.directory, room.sr).unwrap() else { panic!("{generation}") };
        assert!(damage.why.detail.contains("is impossibly high"), "{}", damage.why);
    }
}

#[test]
fn a_newer_or_foreign_inventory_is_reported_as_such() {
    let room = room();
    written(&room);
    let other = read(&room.directory, Uuid::new_v4()).unwrap_err();
    assert_eq!(other.code, Code::State);
    assert!(other.detail.contains(&room.sr.to_string()), "{other}");
    let newer = String::from_utf8(room.bytes()).unwrap().replacen("inventory\":1", "inventory\":2", 1);
    room.put(newer.as_bytes());
    let newer = read(&room.directory, room.sr).unwrap_err();
    assert_eq!(newer.code, Code::Unsupported);
    assert!(newer.advice.unwrap().contains("version"));
}

#[test]
fn invalid_states_are_neither_written_nor_read() {
    let room = room();
    let with = |change: &dyn Fn(&mut Contents)| {
        let (mut contents, _) = history();
        change(&mut contents);
        let problem = Log::write(&room.directory, room.sr, (1, first_head()), &contents, VecDeque::new()).unwrap_err();
        let text = line::header(room.sr, 1, "00", &contents, Vec::new()).unwrap();
        room.put(text.as_bytes());
        assert!(matches!(read(&room.directory, room.sr), Ok(Read::Damaged(_))), "{text}");
        problem.detail
    };
    for file in ["../etc/passwd", "", ".", "..", "a/b", "a\0b", ".tapline-sr.json"] {
        with(&|contents| contents.images.values_mut().for_each(|image| image.file = file.into()));
    }
    let no_loop = with(&|contents| contents.apply(Change::Image(image(1, Some(1)))));
    assert!(no_loop.contains("ancestor"), "{no_loop}");
    with(&|contents| contents.apply(Change::Image(image(1, Some(9)))));
    with(&|contents| contents.apply(Change::Vdi(vdi(3, 1))));
    with(&|contents| contents.apply(Change::Vdi(vdi(3, 9))));
    with(&|contents| contents.apply(Change::Image(InventoryImage { file: "1.qcow2".into(), ..image(5, None) })));
}

#[test]
fn a_damaged_inventory_is_covered_by_a_complete_catalogue() {
    let room = room();
    let (log, _) = written(&room);
    let heads = log.history();
    let head = |at: u64| heads.iter().find(|(known, _)| *known == at).unwrap().clone();
    let damaged = |line: usize| {
        let mut lines: Vec<Vec<u8>> = room.bytes().split_inclusive(|byte| *byte == b'\n').map(Into::into).collect();
        lines[line][20] ^= 1;
        let whole = room.bytes();
        room.put(&lines.concat());
        let Ok(Read::Damaged(damage)) = read(&room.directory, room.sr) else { panic!("line {line}") };
        room.put(&whole);
        damage
    };
    // In the middle: the last line tells the generation.
    assert!(damaged(1).is_known(10, &[head(10)]));
    assert!(damaged(0).is_known(11, &[head(10), head(9)]));
    assert!(!damaged(1).is_known(9, &[head(9)]), "it was further than the catalogue");
    assert!(!damaged(1).is_known(10, &[(10, first_head())]), "it was another history");
    // The last line itself: it may have been the catalogue's, if that is further than the line before.
    assert!(damaged(3).is_known(10, &[head(9), head(10)]));
    assert!(!damaged(3).is_known(9, &[head(9)]));
}
