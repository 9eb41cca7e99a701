//! Random disks with random writes, full and incremental backups, prunes and crashes, in threads and encrypted.
//!
//! Invariants checked: those of the module above, and that reads at random offsets give the same as a restore.

use super::*;
use crate::{Fault, Moment};

/// A disk whose writes are tracked, as a map of changed blocks would.
struct Guest {
    image: Image,
    /// Of the last backup that was acknowledged, and that still exists.
    base: Option<(Record, Vec<std::ops::Range<u64>>)>,
}

impl Guest {
    fn new(random: &mut fastrand::Rng) -> Guest {
        let len = random.usize(0..40) * CHUNK + random.usize(0..2) * random.usize(0..CHUNK);
        Guest { image: Image(vec![0; len]), base: None }
    }

    fn write(&mut self, random: &mut fastrand::Rng) {
        let len = self.image.0.len();
        if len == 0 {
            return;
        }
        let at = random.usize(0..len);
        let end = (at + random.usize(1..3 * CHUNK)).min(len);
        // Few different contents, so that chunks repeat between disks; and zeroes.
        let fill = random.u8(0..5);
        self.image.0[at..end].iter_mut().enumerate().for_each(|(index, byte)| {
            *byte = if fill == 0 { 0 } else { fill.wrapping_mul(((at + index) % 200) as u8) };
        });
        if let Some((_, changed)) = &mut self.base {
            changed.push(at as u64..end as u64);
        }
    }
}

fn episode(seed: u64) -> Result<(), String> {
    seed::set(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let world = World::encrypted(None, random.bool().then(Key::random));
    let mut guests: Vec<Guest> = (0..3).map(|_| Guest::new(&mut random)).collect();
    let mut made: Vec<(Record, usize)> = Vec::new();
    for time in 1..30 {
        let number = random.usize(0..guests.len());
        let guest = &mut guests[number];
        (0..random.usize(0..4)).for_each(|_| guest.write(&mut random));
        let mut memory = world.memory.host();
        if random.u8(0..4) == 0 {
            let fault = Fault::Crash(*random.choice(&Moment::ALL).unwrap());
            memory = memory.fault_at(random.u64(2..25), fault);
        }
        let Ok(target) = world.on(memory) else { continue };
        if random.u8(0..3) == 0 {
            let remove: Vec<Id> = made.iter().filter(|_| random.u8(0..3) == 0).map(|(record, _)| record.id).collect();
            made.retain(|(record, _)| !remove.contains(&record.id));
            for guest in &mut guests {
                guest.base = guest.base.take().filter(|(record, _)| !remove.contains(&record.id));
            }
            // A crash is no violation; what it leaves is looked at below.
            drop(world.prune(&target, &remove, time * 100, random.u64(0..500)));
        } else {
            let base = guest.base.as_ref().filter(|_| random.u8(0..4) != 0).map(|(record, changed)| Base {
                backup: record.id,
                content: record.content,
                changed: changed.clone(),
            });
            world.moments.lock().unwrap().insert(time, guest.image.clone());
            let threads = random.usize(1..3);
            let job = Job { base, threads, ..job(Id::from_bytes([number as u8; 16]), time, &guest.image) };
            if let Ok(record) = with_control(|control| target.back_up(&job, control)) {
                world.acknowledged.lock().unwrap().insert(record.id);
                guest.base = Some((record.clone(), Vec::new()));
                made.push((record, number));
            }
        }
        world.holds().map_err(|what| format!("after step {time}: {what}"))?;
    }
    let target = world.target();
    for (record, _) in &made {
        let reader = Reader::open(&target, record.id, 2 * CHUNK).map_err(|error| error.to_string())?;
        let image = &world.moments.lock().unwrap()[&record.time].0;
        for _ in 0..5 {
            let at = random.usize(0..=image.len());
            let mut buffer = vec![1; random.usize(0..=image.len() - at)];
            reader.read_at(at as u64, &mut buffer).map_err(|error| error.to_string())?;
            if buffer != image[at..at + buffer.len()] {
                return Err(format!("a read at {at} of moment {} differs", record.time));
            }
        }
        assert!(reader.read_at(record.len, &mut [0]).is_err(), "read beyond the end");
    }
    world.check()
}

#[test]
fn random_histories_restore_bit_for_bit() {
    for seed in 0..20 {
        episode(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn many_random_histories_restore_bit_for_bit() {
    for seed in (20..120).chain([704]) {
        episode(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}
