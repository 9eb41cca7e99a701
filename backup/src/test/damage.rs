//! Damage of each object, other keys, newer versions, wrong bases, full and vanished targets: each has its clear error.

use super::*;
use crate::store::StoreErrorKind;
use crate::{Fault, Moment, Name};

fn worlds() -> Vec<(World, Vec<Record>)> {
    [None, Some(Key::random())]
        .into_iter()
        .map(|key| {
            seed::set(1);
            let world = World::encrypted(None, key);
            let target = world.target();
            let first = world.back_up(&target, 1, &image("ABCDEF..IJ"), None).unwrap();
            let second = world.back_up(&target, 2, &image("ABCDkl..mJ"), None).unwrap();
            (world, vec![first, second])
        })
        .collect()
}

/// What a host finds on a damaged target: an error, or damage, or neither.
fn found(world: &World) -> Result<crate::Verified, Error> {
    let target = world.on(world.memory.host())?;
    with_control(|control| target.verify(1, control))
}

fn restores_wrongly(world: &World, records: &[Record]) -> bool {
    let Ok(target) = world.on(world.memory.host()) else { return false };
    let moments = world.moments.lock().unwrap();
    records.iter().any(|record| restore(&target, record.id).is_ok_and(|bytes| bytes != moments[&record.time].0))
}

#[test]
fn a_flipped_bit_in_any_object_is_found_and_never_restored() {
    for (world, records) in worlds() {
        for name in world.memory.names() {
            let bytes = world.memory.bytes(&name).unwrap();
            for at in (0..bytes.len()).step_by(1 + bytes.len() / 60) {
                let copy = world.copy();
                let mut bad = bytes.clone();
                bad[at] ^= 1 << (at % 8);
                copy.memory.set(&name, Some(bad));
                assert!(!restores_wrongly(&copy, &records), "{name} at {at}");
                let outcome = found(&copy);
                // The length of a compressed frame may have a bit that means nothing.
                let is_found = !outcome.as_ref().is_ok_and(crate::Verified::is_clean);
                assert!(is_found, "{name}: a flipped bit at {at} of {} was not found", bytes.len());
                if let Err(error) = outcome {
                    assert!(error.to_string().contains("damaged") || matches!(error, Error::WrongKey), "{error}");
                }
            }
        }
    }
}

#[test]
fn an_object_that_is_cut_off_or_gone_is_found() {
    for (world, records) in worlds() {
        for name in world.memory.names() {
            let bytes = world.memory.bytes(&name).unwrap();
            let lens = (0..bytes.len()).step_by(1 + bytes.len() / 20).chain(bytes.len().checked_sub(1));
            let cut = lens.map(|len| Some(bytes[..len].to_vec()));
            for bad in cut.chain([None]) {
                let copy = world.copy();
                copy.memory.set(&name, bad);
                assert!(!restores_wrongly(&copy, &records), "{name}");
                // Without the last entry of the log the backup was never published.
                let is_clean = |verified: crate::Verified| verified.is_clean() && verified.backups == 2;
                assert!(!found(&copy).is_ok_and(is_clean), "{name} was cut off, and that was not found");
            }
        }
    }
}

#[test]
fn two_objects_that_were_swapped_are_found() {
    for (world, records) in worlds() {
        let names = world.memory.names();
        for first in &names {
            for second in &names {
                let (a, b) = (world.memory.bytes(first), world.memory.bytes(second));
                if a == b {
                    continue;
                }
                let copy = world.copy();
                copy.memory.set(first, b);
                copy.memory.set(second, a);
                assert!(!restores_wrongly(&copy, &records), "{first} and {second}");
                assert!(!found(&copy).is_ok_and(|verified| verified.is_clean()), "{first} and {second} were swapped");
            }
        }
    }
}

#[test]
fn a_verification_names_disks_and_moments_that_damage_costs_and_a_new_backup_replaces_the_damage() {
    seed::set(2);
    let world = World::new(None);
    let target = world.target();
    let shared = image("ABCDEF");
    let first = world.back_up(&target, 1, &shared, None).unwrap();
    world.back_up(&target, 2, &image("uvwxyz"), None).unwrap();
    // The first pack has the chunks of the first backup.
    let chunks = crate::chunks::Chunks::load(&target, |_| false).unwrap();
    let digest = target.codec.digest(crate::codec::Kind::Chunk, &shared.0[CHUNK..2 * CHUNK]);
    let place = chunks.places[&digest];
    let pack = chunks.pack(&place).unwrap().clone();
    let mut bytes = world.memory.bytes(&pack).unwrap();
    bytes[place.at as usize + 20] ^= 1;
    world.memory.set(&pack, Some(bytes));
    let verified = with_control(|control| target.verify(2, control)).unwrap();
    assert!(verified.damaged.iter().all(|(name, _)| *name == pack) && verified.damaged.len() == 1, "{verified:?}");
    assert_eq!(verified.lost.len(), 1);
    assert_eq!(verified.lost[0].record, first);
    assert_eq!(verified.lost[0].ranges.len(), 1);
    assert_eq!(verified.lost[0].ranges[0], CHUNK as u64..2 * CHUNK as u64);
    let error = restore(&target, first.id).unwrap_err();
    assert!(matches!(error, Error::Lost { at: 4096, len: 4096, .. }), "{error}");
    // The damaged copy would be found by its digest: it is avoided.
    let avoided = verified.damaged.iter().map(|(name, _)| name.clone()).collect();
    let job = Job { avoided, ..job(DISK, 1, &shared) };
    let again = with_control(|control| target.back_up(&job, control)).unwrap();
    assert_eq!(restore(&target, again.id).unwrap(), shared.0);
    assert_eq!(restore(&target, first.id).unwrap(), shared.0, "a sound copy is used by all backups");
    for now in [1000, 2000, 3000] {
        prune(&target, &[], now, 0).unwrap();
        assert_eq!(
            restore(&target, again.id).unwrap(),
            shared.0,
            "a prune kept the damaged copy and not the sound one"
        );
    }
    assert!(with_control(|control| target.verify(1, control)).unwrap().is_clean());
}

#[test]
fn keys_and_versions_are_refused_in_words_before_anything_is_done() {
    seed::set(3);
    let key = Key::random();
    let closed = World::encrypted(None, Some(key.clone()));
    let open = World::new(None);
    let on = |world: &World, key: Option<&Key>| Target::open(Arc::new(world.memory.host()), key).map(|_| ());
    assert!(matches!(on(&closed, Some(&Key::random())), Err(Error::WrongKey)));
    assert!(matches!(on(&closed, None), Err(Error::KeyNeeded)));
    assert!(matches!(on(&open, Some(&key)), Err(Error::NotEncrypted)));
    assert!(matches!(Target::open(Arc::new(Memory::new()), None), Err(Error::NoTarget)));
    let name = Name::format();
    let text = String::from_utf8(open.memory.bytes(&name).unwrap()).unwrap();
    let line = text.lines().next().unwrap().replace("\"tapline-backup\":2", "\"tapline-backup\":3,\"x\":[]");
    let newer = format!("{line}\n{}\n-\n", blake3::hash(line.as_bytes()).to_hex());
    open.memory.set(&name, Some(newer.into_bytes()));
    let error = on(&open, None).unwrap_err();
    assert!(matches!(error, Error::NewerVersion { found: 3, known: 2 }), "{error}");
    assert!(error.to_string().contains("update"));
    // One of the version before.
    let line = line.replace("\"tapline-backup\":3,\"x\":[]", "\"tapline-backup\":1");
    let older = format!("{line}\n{}\n-\n", blake3::hash(line.as_bytes()).to_hex());
    open.memory.set(&name, Some(older.into_bytes()));
    on(&open, None).unwrap();
    // Encryption cannot be switched off by who can write to the target.
    let text = String::from_utf8(closed.memory.bytes(&name).unwrap()).unwrap();
    let line = text.lines().next().unwrap().replace("xchacha20-poly1305", "none");
    let weak = format!("{line}\n{}\n-\n", blake3::hash(line.as_bytes()).to_hex());
    closed.memory.set(&name, Some(weak.into_bytes()));
    assert!(matches!(on(&closed, Some(&key)), Err(Error::NotEncrypted)));
}

#[test]
fn an_incremental_backup_on_another_base_is_refused() {
    let refused = |bug| {
        seed::set(4);
        let world = World::new(bug);
        let target = world.target();
        let (old, new) = (image("ABCDEF"), image("ABCDEx"));
        let right = world.back_up(&target, 1, &old, None).unwrap();
        let other = back_up(&target, Id::from_bytes([9; 16]), 2, &old, None).unwrap();
        let later = world.back_up(&target, 3, &image("zzzzzz"), None).unwrap();
        let base = base_on(&right, &old, &new);
        let tries = [
            Base { backup: other.id, ..base.clone() },
            Base { backup: later.id, ..base.clone() },
            Base { backup: Id::from_bytes([1; 16]), ..base.clone() },
        ];
        for wrong in tries {
            match back_up(&target, DISK, 4, &new, Some(wrong)) {
                Err(Error::WrongBase { .. }) => {}
                other => return Err(format!("{other:?}")),
            }
        }
        let longer = image("ABCDExy");
        assert!(matches!(back_up(&target, DISK, 4, &longer, Some(base.clone())), Err(Error::WrongBase { .. })));
        let made = back_up(&target, DISK, 5, &new, Some(base)).unwrap();
        assert_eq!(restore(&target, made.id).unwrap(), new.0);
        let statistics = target.statistics(made.id).unwrap();
        assert_eq!((statistics.read, statistics.unchanged), (CHUNK as u64, 5 * CHUNK as u64));
        Ok(())
    };
    refused(None).unwrap();
    assert!(refused(Some(Bug::AnyBase)).is_err(), "the planted bug was not found");
}

#[test]
fn a_pack_that_is_cut_off_is_sent_again() {
    let outcome = |bug| {
        seed::set(5);
        let world = World::new(bug);
        let target = world.target();
        let disk = image("ABC");
        let record = world.back_up(&target, 1, &disk, None).unwrap();
        prune(&target, &[record.id], 10, 0).unwrap();
        // A host dies before it puts its index, and its file server has lost the end of a pack that it said was synced.
        let packs = || world.memory.names().into_iter().filter(|name| name.as_str().starts_with("packs/"));
        for call in 0.. {
            let dying = world.on(world.memory.host().fault_at(call, Fault::Crash(Moment::Before)));
            assert!(dying.and_then(|dying| back_up(&dying, DISK, 2, &disk, None)).is_err());
            if packs().count() > 0 {
                break;
            }
        }
        for pack in packs() {
            let bytes = world.memory.bytes(&pack).unwrap();
            world.memory.set(&pack, Some(bytes[..bytes.len() - 20].to_vec()));
        }
        let again = back_up(&target, DISK, 3, &disk, None).unwrap();
        restore(&target, again.id).map(|bytes| assert_eq!(bytes, disk.0))
    };
    outcome(None).unwrap();
    assert!(outcome(Some(Bug::CutOffAccepted)).is_err(), "the planted bug was not found");
}

#[test]
fn full_and_vanished_targets_say_so() {
    for (kind, word) in [(StoreErrorKind::NoSpace, "full"), (StoreErrorKind::Vanished, "not reachable")] {
        seed::set(6);
        let world = World::new(None);
        let faulty = world.on(world.memory.host().fault_at(6, Fault::Fail(kind, Moment::Before))).unwrap();
        let error = back_up(&faulty, DISK, 1, &image("ABCDEFG"), None).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        world.moments.lock().unwrap().insert(1, image("ABCDEFG"));
        world.check().unwrap();
    }
}

#[test]
fn a_damaged_log_leaves_backups_that_can_be_salvaged() {
    seed::set(7);
    let world = World::new(None);
    let target = world.target();
    let record = world.back_up(&target, 1, &image("ABC"), None).unwrap();
    let log = |name: &Name| name.as_str().starts_with("log/");
    world.memory.names().iter().filter(|name| log(name)).for_each(|name| world.memory.set(name, None));
    assert!(target.backups().is_err());
    let (found, bad) = target.salvage().unwrap();
    assert_eq!((found, bad), (vec![record.clone()], vec![]));
    assert_eq!(restore(&target, record.id).unwrap(), image("ABC").0);
    assert!(prune(&target, &[], 1, 0).is_err());
    assert!(back_up(&target, DISK, 2, &image("ABC"), None).is_err());
}
