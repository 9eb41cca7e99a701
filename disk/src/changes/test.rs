//! A map in memory: what it names, and what it refuses.

use super::*;

const ID: MapId = [7; 16];

fn spec(len: u64) -> Spec {
    Spec { id: ID, continues: None, len, block: BLOCK }
}

fn bytes_of(spec: &Spec) -> Vec<u8> {
    let creation = create(spec).unwrap();
    // What is not written is rubbish on a device.
    let mut bytes = vec![0xa5; in_memory(creation.len)];
    apply(&mut bytes, &creation.writes);
    bytes
}

fn apply(bytes: &mut [u8], writes: &[MetaWrite]) {
    for write in writes {
        bytes[in_memory(write.at.0)..][..write.bytes.len()].copy_from_slice(&write.bytes);
    }
}

fn open(bytes: &[u8]) -> Result<ChangeMap, ImageError> {
    ChangeMap::open(&mut { bytes })
}

/// A file whose map names these blocks and has intents for these regions.
fn with(spec: &Spec, blocks: &[u64], intents: &[usize]) -> Vec<u8> {
    let mut bytes = bytes_of(spec);
    let mut map = open(&bytes).unwrap();
    for block in blocks {
        map.changed[in_memory(block / 64)] |= 1 << (block % 64);
    }
    let writes = map.writes(0..page_count(map.changed.len()), |region| intents.contains(&region));
    apply(&mut bytes, &writes);
    bytes
}

fn extents(map: &ChangeMap) -> Vec<(u64, u64)> {
    map.extents().map(|span| (span.at.0, span.len)).collect()
}

const MIB: u64 = 1 << 20;

#[test]
fn a_new_map_names_nothing() {
    let map = open(&bytes_of(&spec(1 << 40))).unwrap();
    assert!(map.is_new() && map.is_empty() && !map.is_sealed());
    assert_eq!((map.len(), map.damaged(), map.suspects(), map.extents().count()), (1 << 40, 0, 0, 0));
}

#[test]
fn extents_are_whole_blocks_and_end_with_the_disk() {
    let len = 300 * MIB + 4096;
    let last = len / u64::from(BLOCK);
    let map = open(&with(&spec(len), &[0, 63, 64, last - 1, last], &[])).unwrap();
    let block = u64::from(BLOCK);
    let end = ((last - 1) * block, block + 4096);
    assert_eq!(extents(&map), [(0, block), (63 * block, 2 * block), end]);
    assert!(map.has_changed(DiskOffset(4096)) && !map.has_changed(DiskOffset(block)));
}

#[test]
fn a_region_with_an_intent_counts_as_changed_throughout() {
    let map = open(&with(&spec(300 * MIB), &[0], &[1, 74])).unwrap();
    let block = u64::from(BLOCK);
    assert_eq!(extents(&map), [(0, block), (4 * MIB, 4 * MIB), (296 * MIB, 4 * MIB)]);
    assert_eq!(map.suspects(), 2);
}

#[test]
fn a_page_that_is_not_whole_or_is_anothers_counts_as_changed_throughout() {
    let spec = spec(300 * MIB);
    let sound = with(&spec, &[0], &[]);
    let other = bytes_of(&Spec { id: [8; 16], ..spec });
    let at = in_memory(page_at(1).0);
    let mut torn = sound.clone();
    torn[at + 40] ^= 1;
    let mut anothers = sound.clone();
    anothers[at..at + 512].copy_from_slice(&other[at..at + 512]);
    let mut misplaced = sound.clone();
    misplaced.copy_within(at - 512..at, at);
    for bytes in [torn, anothers, misplaced] {
        let map = open(&bytes).unwrap();
        assert_eq!(extents(&map), [(0, u64::from(BLOCK)), (240 * MIB, 60 * MIB)]);
        assert_eq!(map.damaged(), 1);
    }
}

#[test]
fn the_newer_header_counts_and_one_that_says_that_changes_are_missing_is_refused() {
    let mut bytes = bytes_of(&spec(8 * MIB));
    let mut map = open(&bytes).unwrap();
    apply(&mut bytes, &[map.next_header(true, 8 * MIB)]);
    assert!(open(&bytes).unwrap().is_sealed());
    let [first, second] = HEADERS_AT.map(|at| in_memory(at.0));
    for headers in map.invalid_headers() {
        let mut bytes = bytes.clone();
        apply(&mut bytes, &[headers]);
        let refused = open(&bytes).unwrap_err();
        assert!(refused.what.contains("misses changes"), "{refused}");
    }
    bytes[first + 24] ^= 1;
    assert!(!open(&bytes).unwrap().is_sealed(), "the older one, which is whole");
    bytes[second + 24] ^= 1;
    assert_eq!(open(&bytes).unwrap_err().kind, ImageErrorKind::WrongFormat);
}

#[test]
fn other_versions_and_files_that_are_too_short_are_refused() {
    let sound = bytes_of(&spec(300 * MIB));
    let mut newer = sound.clone();
    newer[8] = 9;
    assert!(open(&newer).unwrap_err().what.contains("version 9"));
    assert_eq!(open(&sound[..sound.len() - 1]).unwrap_err().kind, ImageErrorKind::Corrupt);
    assert_eq!(open(&sound[..100]).unwrap_err().kind, ImageErrorKind::WrongFormat);
    assert_eq!(open(&[]).unwrap_err().kind, ImageErrorKind::WrongFormat);
    for (len, block) in [(0, BLOCK), (MIB, 0), (MIB, 1000), (u64::MAX, 512)] {
        assert!(create(&Spec { len, block, ..spec(1) }).is_err(), "{len} in {block}");
    }
}

#[test]
fn successive_maps_are_joined_and_others_refused() {
    let next = Spec { id: [8; 16], continues: Some(ID), len: 8 * MIB, block: BLOCK };
    let maps = |first: &Spec, second: &Spec| {
        [with(first, &[0], &[]), with(second, &[65], &[])].map(|bytes| open(&bytes).unwrap())
    };
    let joined = ChangeMap::union(maps(&spec(4 * MIB), &next)).unwrap();
    let block = u64::from(BLOCK);
    assert_eq!(extents(&joined), [(0, block), (65 * block, block)]);
    let refused = |first: &Spec, second: &Spec| ChangeMap::union(maps(first, second)).unwrap_err().what;
    assert!(refused(&spec(8 * MIB), &Spec { continues: None, ..next }).contains("does not continue"));
    assert!(refused(&spec(8 * MIB), &Spec { block: BLOCK / 2, ..next }).contains("in blocks of"));
    assert!(ChangeMap::union([]).is_err());
}

#[test]
fn xapi_has_the_first_block_in_the_highest_bit() {
    let map = open(&with(&spec(20 * u64::from(BLOCK)), &[0, 6, 8, 19], &[])).unwrap();
    // 1000_0010 1000_0000 0001_0000
    assert_eq!(map.to_xapi(), "goAQ");
    assert_eq!(BASE64_STANDARD.encode(b"foob"), "Zm9vYg==");
}

#[test]
fn the_contents_of_a_map_are_a_file_that_names_the_same() {
    let suspect = open(&with(&spec(300 * MIB + 512), &[0, 4800], &[3])).unwrap();
    let mut bytes = vec![0xa5; in_memory(page_at(2).0)];
    apply(&mut bytes, &suspect.contents());
    let copy = open(&bytes).unwrap();
    assert_eq!(extents(&copy), extents(&suspect));
    assert_eq!((copy.id(), copy.len(), copy.suspects(), copy.damaged()), (suspect.id(), suspect.len(), 0, 0));
}

#[test]
fn a_map_that_was_extended_for_a_disk_that_did_not_grow_is_shortened() {
    let next = Spec { id: [8; 16], continues: Some(ID), len: 5 * MIB, block: BLOCK };
    let (last, behind) = (79, 80);
    let long = open(&with(&spec(300 * MIB), &[0, last, behind, 4000], &[])).unwrap();
    let short = open(&with(&next, &[65], &[])).unwrap();
    let block = u64::from(BLOCK);
    let joined = [(0, block), (65 * block, block), (last * block, block)];
    assert_eq!(extents(&ChangeMap::union([long.clone(), short]).unwrap()), joined);
    let mut shortened = long;
    shortened.shorten(5 * MIB);
    assert_eq!((extents(&shortened), shortened.len()), (vec![(0, block), (last * block, block)], 5 * MIB));
    // It is extended again later, and names nothing there.
    let pages = shortened.make_room(300 * MIB).unwrap();
    assert_eq!((pages, extents(&shortened).len()), (0..2, 2));
    shortened.set_len(300 * MIB);
    assert_eq!(extents(&shortened).len(), 2);
    shortened.shorten(400 * MIB);
    assert_eq!(shortened.len(), 300 * MIB);
}
