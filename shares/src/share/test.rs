//! Invariants checked, on a time of its own, with disks whose clients keep requests under way, over a device that has
//! some channels and serves requests in their order:
//! - disks of one weight get the same within six percent, and weights count, however many disks there are;
//! - the total is that without shares, within six percent;
//! - a disk that is greedy at most doubles the 99th percentile of modest ones;
//! - a disk that comes, goes, dies, hangs or lies takes nothing from the others but for a time that is bounded.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::*;

/// What can be done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A disk keeps the virtual time that it had when it became idle.
    SavesUp,
    /// It waits although it has nothing in flight.
    MayHaveNone,
    /// It begins whatever it has while it is not ahead.
    HasNoDepth,
    /// It does not compare its virtual time with others'.
    IsNeverAhead,
    /// It has one request in flight if there are more disks than the depth, whatever its weight.
    IsNeverBehind,
    /// Its weight does not count.
    HasOneWeight,
    /// It takes it that it is alone whenever nothing is in flight of the others.
    ForgetsOthersAtOnce,
    /// A slot that does not change counts as any other.
    TrustsForGood,
    /// It waits for one that is behind however far that is.
    ForgivesNothing,
    /// A request of its own that hangs holds back its others.
    WaitsForGood,
    /// Its virtual time is compared as a number that does not wrap around.
    NeverWraps,
}

thread_local! {
    static PLANTED: Cell<Option<Planted>> = const { Cell::new(None) };
    static SEED: Cell<u64> = const { Cell::new(0) };
}

/// The seeds by which clients begin and think at other times. Each is that of all runs until the next.
fn seeds() -> impl Iterator<Item = u64> {
    (1..=3).inspect(|seed| SEED.set(*seed))
}

/// Whether that is done wrong in this thread.
pub fn is_planted(fault: Planted) -> bool {
    PLANTED.get() == Some(fault)
}

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

/// What a request of 4 KiB takes, in nanoseconds; others as much more as they cost more.
const SERVICE: u64 = 400_000;

/// A client of a disk.
#[derive(Clone, Copy)]
struct Client {
    /// Requests at once.
    depth: u32,
    bytes: u64,
    /// Between an answer and the next request: from nothing to twice this.
    thinks: u64,
    /// When it begins and ends.
    from: u64,
    until: u64,
}

const MODEST: Client = Client { depth: 1, bytes: 4096, thinks: 0, from: 0, until: u64::MAX };
const GREEDY: Client = Client { depth: 128, ..MODEST };
const USUAL: Client = Client { depth: 32, ..MODEST };

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// The client of this disk has a request.
    Asks(usize),
    /// A request of this disk has ended, which came at that time.
    Ends(usize, u64),
    /// The timer of a disk for which something waits.
    Fires(usize),
}

struct Disk {
    client: Client,
    /// Without one nothing waits.
    share: Option<Share>,
    /// It was killed: nothing of it is answered, and its slot stays as it is.
    dead: bool,
    held: VecDeque<u64>,
    in_flight: u32,
    bytes: u64,
    /// Nanoseconds from coming to answer.
    took: Vec<u64>,
    timer: bool,
}

struct Run {
    disks: Vec<Disk>,
    page: Vec<Slot>,
    depth: u32,
    /// What is under way in the device, which has so many channels.
    channels: usize,
    busy: usize,
    queue: VecDeque<(usize, u64)>,
    events: BinaryHeap<Reverse<(u64, u64, What)>>,
    order: u64,
    now: u64,
    random: u64,
    /// What is answered after this counts.
    warm: u64,
    /// Changes the slots at each look: a hostile process.
    lies: Option<fn(&mut [Slot], u64)>,
}

impl Run {
    /// Disks with these weights; zero is without a share.
    fn new(channels: usize, clients: &[(Client, u32)]) -> Run {
        let disk = |&(client, weight): &(Client, u32)| Disk {
            client,
            share: (weight > 0).then(|| Share::new(weight, 0)),
            dead: false,
            held: VecDeque::new(),
            in_flight: 0,
            bytes: 0,
            took: Vec::new(),
            timer: false,
        };
        let disks: Vec<Disk> = clients.iter().map(disk).collect();
        let mut run = Run {
            page: vec![Slot::default(); disks.len()],
            disks,
            depth: 32,
            channels,
            busy: 0,
            queue: VecDeque::new(),
            events: BinaryHeap::new(),
            order: 0,
            now: 0,
            random: SEED.get(),
            warm: SECOND / 2,
            lies: None,
        };
        for number in 0..run.disks.len() {
            let client = run.disks[number].client;
            for _ in 0..client.depth {
                let soon = run.below(MS);
                run.at(client.from + soon, What::Asks(number));
            }
        }
        run
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end.max(1)
    }

    fn at(&mut self, time: u64, what: What) {
        self.order += 1;
        self.events.push(Reverse((time, self.order, what)));
    }

    fn until(&mut self, end: u64) -> &mut Run {
        while let Some(&Reverse((time, _, what))) = self.events.peek() {
            if time > end {
                break;
            }
            self.events.pop();
            self.now = time;
            match what {
                What::Asks(number) => self.asks(number),
                What::Ends(number, came) => self.ends(number, came),
                What::Fires(number) => {
                    self.disks[number].timer = false;
                    self.turn(number);
                }
            }
        }
        self.now = end;
        self
    }

    fn asks(&mut self, number: usize) {
        if self.now < self.disks[number].client.until {
            let now = self.now;
            self.disks[number].held.push_back(now);
            self.turn(number);
        }
    }

    fn ends(&mut self, number: usize, came: u64) {
        self.busy -= 1;
        self.serve();
        let now = self.now;
        let disk = &mut self.disks[number];
        if disk.dead {
            return;
        }
        disk.in_flight -= 1;
        if let Some(share) = &mut disk.share {
            share.answered(1, now);
        }
        if now >= self.warm {
            disk.bytes += disk.client.bytes;
            disk.took.push(now - came);
        }
        let thinks = disk.client.thinks;
        if thinks == 0 {
            self.asks(number);
        } else {
            let pause = self.below(2 * thinks);
            self.at(now + pause, What::Asks(number));
        }
        self.turn(number);
    }

    /// A turn of a disk's loop.
    fn turn(&mut self, number: usize) {
        let now = self.now;
        let bytes = self.disks[number].client.bytes;
        if self.disks[number].dead {
            return;
        }
        let Some(mut share) = self.disks[number].share.take() else {
            while let Some(came) = self.disks[number].held.pop_front() {
                self.begin(number, came);
            }
            return;
        };
        if share.is_due(now) {
            if let Some(lies) = self.lies {
                lies(&mut self.page, now);
            }
            let others = self.page.iter().copied().enumerate().filter(|(other, _)| *other != number);
            share.look(now, self.depth, others);
        }
        let mut allowance = share.allowance(self.disks[number].in_flight, now);
        while allowance.allows() {
            let Some(came) = self.disks[number].held.pop_front() else { break };
            allowance.take(cost(bytes));
            share.begin(cost(bytes));
            self.begin(number, came);
        }
        let disk = &mut self.disks[number];
        let waits = !disk.held.is_empty();
        self.page[number] = share.slot(disk.in_flight, waits);
        if waits {
            assert!(disk.in_flight > 0, "a disk may always have one in flight");
        }
        disk.share = Some(share);
        if waits && !disk.timer {
            disk.timer = true;
            self.at(now + 100 * MS, What::Fires(number));
        }
    }

    fn begin(&mut self, number: usize, came: u64) {
        self.disks[number].in_flight += 1;
        self.queue.push_back((number, came));
        self.serve();
    }

    fn serve(&mut self) {
        while self.busy < self.channels {
            let Some((number, came)) = self.queue.pop_front() else { return };
            self.busy += 1;
            let takes = SERVICE * cost(self.disks[number].client.bytes) / cost(4096);
            self.at(self.now + takes, What::Ends(number, came));
        }
    }

    fn cost_of(&self, number: usize) -> u64 {
        let disk = &self.disks[number];
        disk.bytes / disk.client.bytes * cost(disk.client.bytes)
    }

    fn total(&self) -> u64 {
        (0..self.disks.len()).map(|number| self.cost_of(number)).sum()
    }

    /// The 99th percentile of these disks, in nanoseconds.
    fn p99(&self, disks: std::ops::Range<usize>) -> u64 {
        let mut all: Vec<u64> = self.disks[disks].iter().flat_map(|disk| disk.took.iter().copied()).collect();
        all.sort_unstable();
        all[all.len() * 99 / 100]
    }

    /// The least and the most of these disks, by their weights, in thousandths of the mean.
    fn spread(&self, disks: std::ops::Range<usize>) -> (u64, u64) {
        let shares: Vec<u64> = disks
            .map(|number| self.cost_of(number) / u64::from(self.disks[number].share.as_ref().map_or(1, Share::weight)))
            .collect();
        let mean = shares.iter().sum::<u64>() / u64::try_from(shares.len()).unwrap();
        (shares.iter().min().unwrap() * 1000 / mean, shares.iter().max().unwrap() * 1000 / mean)
    }
}

fn many(client: Client, weight: u32, count: usize) -> Vec<(Client, u32)> {
    vec![(client, weight); count]
}

fn assert_fair(run: &Run, disks: std::ops::Range<usize>, what: &str) {
    let (least, most) = run.spread(disks);
    assert!(least >= 940 && most <= 1060, "{what}, seed {}: {least} to {most} thousandths", SEED.get());
}

#[test]
fn disks_of_one_weight_get_the_same_and_the_total_does_not_fall() {
    for _ in seeds() {
        for (channels, count) in [(1, 2), (16, 2), (16, 3), (24, 10), (16, 40), (16, 100)] {
            let mut run = Run::new(channels, &many(USUAL, WEIGHT, count));
            run.until(3 * SECOND);
            assert_fair(&run, 0..count, &format!("{count} on {channels}"));
            let mut without = Run::new(channels, &many(USUAL, 0, count));
            without.until(3 * SECOND);
            let (total, best) = (run.total(), without.total());
            assert!(total * 100 >= best * 94, "{count} on {channels}: {total} instead of {best}");
        }
    }
}

#[test]
fn a_disk_that_asks_for_more_does_not_get_more() {
    for _ in seeds() {
        for count in [2, 5, 20] {
            let mut clients = many(Client { depth: 16, ..USUAL }, WEIGHT, count);
            clients[0].0.depth = 256;
            let mut run = Run::new(16, &clients);
            run.until(3 * SECOND);
            assert_fair(&run, 0..count, &format!("{count}"));
        }
    }
}

#[test]
fn a_greedy_disk_at_most_doubles_the_latency_of_modest_ones() {
    for _ in seeds() {
        for thinks in [0, 2 * MS, 20 * MS] {
            let modest = Client { thinks, ..MODEST };
            let mut clients = many(modest, WEIGHT, 99);
            let mut alone = Run::new(16, &clients);
            let alone = alone.until(2 * SECOND).p99(0..99);
            clients.push((GREEDY, WEIGHT));
            let mut run = Run::new(16, &clients);
            // What the device does at once: with more, a request of a disk that was idle has to wait for more.
            run.depth = 16;
            let beside = run.until(2 * SECOND).p99(0..99);
            assert!(beside <= 2 * alone, "thinking for {thinks}: {beside} instead of {alone}");
        }
    }
}

#[test]
fn weights_count_whether_there_are_fewer_disks_than_the_depth_or_more() {
    for _ in seeds() {
        for each in [1, 5, 34] {
            let weights = [100, 200, 400].map(|weight| many(Client { depth: 128, ..USUAL }, weight, each)).concat();
            let mut run = Run::new(16, &weights);
            run.until(4 * SECOND);
            assert_fair(&run, 0..weights.len(), &format!("{each} of each"));
        }
    }
}

#[test]
fn requests_of_different_sizes_share_by_their_cost() {
    for _ in seeds() {
        for each in [2, 30] {
            let clients = [4096, 65_536].map(|bytes| many(Client { bytes, ..USUAL }, WEIGHT, each)).concat();
            let mut run = Run::new(16, &clients);
            run.until(6 * SECOND);
            assert_fair(&run, 0..clients.len(), &format!("{each} of each"));
        }
    }
}

#[test]
fn a_disk_that_was_idle_has_not_saved_up() {
    for _ in seeds() {
        let late = Client { from: 2 * SECOND, ..GREEDY };
        let mut clients = many(GREEDY, WEIGHT, 3);
        clients.push((late, WEIGHT));
        let mut run = Run::new(16, &clients);
        run.warm = 2 * SECOND + 10 * MS;
        run.until(3 * SECOND);
        assert_fair(&run, 0..4, "after one has come");
    }
}

#[test]
fn a_disk_has_the_storage_for_itself_when_the_others_are_idle() {
    for _ in seeds() {
        let short = Client { until: SECOND, ..GREEDY };
        let mut run = Run::new(16, &[(GREEDY, WEIGHT), (short, WEIGHT), (short, WEIGHT)]);
        run.warm = SECOND + 10 * MS;
        run.until(2 * SECOND);
        let could = (SECOND - 10 * MS) / SERVICE * 16 * cost(4096);
        assert!(run.cost_of(0) * 100 >= could * 94, "{} instead of {could}", run.cost_of(0));
    }
}

#[test]
fn a_killed_disk_keeps_the_others_back_for_a_bounded_time() {
    for _ in seeds() {
        let mut run = Run::new(16, &many(GREEDY, WEIGHT, 3));
        run.until(SECOND);
        // Its slot says what it said last.
        run.disks[0].dead = true;
        run.page[0] = Slot { in_flight: 256, waits: true, time: run.page[1].time.wrapping_sub(1 << 40), ..run.page[0] };
        run.until(SECOND + STUCK + 300 * MS);
        let before: Vec<u64> = run.disks.iter().map(|disk| disk.bytes).collect();
        run.until(SECOND + STUCK + 1300 * MS);
        let after = |number: usize| run.disks[number].bytes - before[number];
        let could = SECOND / SERVICE * 16 * 4096;
        assert!((after(1) + after(2)) * 100 >= could * 94, "{} of {could}", after(1) + after(2));
        assert!(after(1).abs_diff(after(2)) * 50 <= after(1), "{} and {}", after(1), after(2));
    }
}

#[test]
fn while_a_slot_lies_each_disk_goes_on_with_one_request_at_a_time() {
    for _ in seeds() {
        let lies: [fn(&mut [Slot], u64); 4] = [
            |page, now| page[0] = Slot { in_flight: u32::MAX, waits: true, time: now, answered: now },
            |page, now| page[0] = Slot { in_flight: 1, waits: true, time: now << 40, answered: now },
            |page, now| page[0] = Slot { in_flight: 1, waits: true, time: 0u64.wrapping_sub(now << 20), answered: now },
            |page, now| {
                page.fill(Slot { in_flight: 256, waits: now % 2 == 0, time: now.wrapping_mul(now), answered: now })
            },
        ];
        for (lie, lies) in lies.into_iter().enumerate() {
            let mut clients = many(GREEDY, WEIGHT, 3);
            clients[0].0.from = u64::MAX >> 1;
            let mut run = Run::new(16, &clients);
            run.lies = Some(lies);
            run.until(2 * SECOND);
            let one_at_a_time = (2 * SECOND - run.warm) / SERVICE * 4096;
            for number in [1, 2] {
                let bytes = run.disks[number].bytes;
                assert!(bytes * 100 >= one_at_a_time * 94, "lie {lie}: {bytes} instead of {one_at_a_time}");
            }
            // When it ends, nothing is left of it.
            run.lies = None;
            run.page[0] = Slot::default();
            run.until(3 * SECOND);
            let before: Vec<u64> = run.disks.iter().map(|disk| disk.bytes).collect();
            run.until(4 * SECOND);
            let after = |number: usize| run.disks[number].bytes - before[number];
            let could = SECOND / SERVICE * 16 * 4096;
            assert!((after(1) + after(2)) * 100 >= could * 94, "lie {lie}: {} of {could}", after(1) + after(2));
        }
    }
}

#[test]
fn a_disk_that_hangs_does_not_keep_its_own_requests_for_good() {
    let mut share = Share::new(WEIGHT, 0);
    let busy = |now| Slot { in_flight: 256, waits: true, time: now, answered: now };
    share.look(0, DEPTH, std::iter::once((0, busy(1))));
    assert!(share.allowance(0, 0).allows(), "the first");
    for now in [MS, 100 * MS, 900 * MS] {
        share.look(now, DEPTH, std::iter::once((0, busy(now))));
        assert!(!share.allowance(1, now).allows(), "the storage has it");
    }
    let now = OVERDUE + 2 * MS;
    share.look(now, DEPTH, std::iter::once((0, busy(now))));
    assert_eq!(share.allowance(1, now), Allowance::ONE);
    assert!(!share.allowance(2, now).allows());
}

#[test]
fn virtual_times_may_wrap_around() {
    for _ in seeds() {
        let mut run = Run::new(16, &many(USUAL, WEIGHT, 4));
        for (number, disk) in run.disks.iter_mut().enumerate() {
            let early = u64::try_from(number).unwrap();
            disk.share = Some(Share::new(WEIGHT, 0u64.wrapping_sub((1 << 34) + early)));
        }
        run.until(2 * SECOND);
        assert_fair(&run, 0..4, "around zero");
        assert!(run.page.iter().all(|slot| slot.time < 1 << 60), "they have wrapped around");
        // One that has wrapped around before this one is ahead of it.
        let mut share = Share::new(WEIGHT, u64::MAX - 10);
        share.slot(1, true);
        share.look(0, DEPTH, std::iter::once((0, Slot { in_flight: 1, waits: true, time: 5, answered: 0 })));
        assert!(share.allowance(1, 0).allows() && share.slot(1, true).time == u64::MAX - 10);
    }
}

/// A disk that waits for what another one is behind is bounded in what it waits for.
#[test]
fn a_disk_that_is_far_ahead_waits_for_a_bounded_part_of_that() {
    for _ in seeds() {
        let mut clients = many(GREEDY, WEIGHT, 2);
        clients[1].0.from = u64::MAX >> 1;
        let mut run = Run::new(16, &clients);
        // It has been dragged ahead of all others by a page that was a lie.
        run.disks[0].share = Some(Share::new(WEIGHT, 1 << 50));
        run.page[0].time = 1 << 50;
        run.lies = Some(|page, now| page[1] = Slot { in_flight: 31, waits: true, time: 7, answered: now });
        run.until(SECOND);
        assert!(run.page[0].time <= 7 + u64::try_from(DEBT).unwrap() + (1 << 36), "{} is forgiven", run.page[0].time);
    }
}

/// Each rule is needed, and its test would notice if it were missing.
#[test]
fn each_planted_fault_is_found() {
    let tests: [(Planted, fn()); 11] = [
        (Planted::SavesUp, a_disk_that_was_idle_has_not_saved_up),
        (Planted::MayHaveNone, while_a_slot_lies_each_disk_goes_on_with_one_request_at_a_time),
        (Planted::HasNoDepth, a_greedy_disk_at_most_doubles_the_latency_of_modest_ones),
        (Planted::IsNeverAhead, a_disk_that_asks_for_more_does_not_get_more),
        (Planted::IsNeverBehind, weights_count_whether_there_are_fewer_disks_than_the_depth_or_more),
        (Planted::HasOneWeight, weights_count_whether_there_are_fewer_disks_than_the_depth_or_more),
        (Planted::ForgetsOthersAtOnce, a_greedy_disk_at_most_doubles_the_latency_of_modest_ones),
        (Planted::TrustsForGood, a_killed_disk_keeps_the_others_back_for_a_bounded_time),
        (Planted::ForgivesNothing, a_disk_that_is_far_ahead_waits_for_a_bounded_part_of_that),
        (Planted::WaitsForGood, a_disk_that_hangs_does_not_keep_its_own_requests_for_good),
        (Planted::NeverWraps, virtual_times_may_wrap_around),
    ];
    for (fault, test) in tests {
        PLANTED.set(Some(fault));
        let found = std::panic::catch_unwind(test).is_err();
        PLANTED.set(None);
        assert!(found, "{fault:?} is not noticed");
    }
}
