//! Reads and writes that wait for memory.

use super::clusters::{CLUSTER, Clusters, content};
use super::*;

const CLUSTERS: u64 = 32;
/// Of a fill around a write of one sector.
const AROUND: u64 = CLUSTER - 512;

impl<F: Format> Rig<F> {
    /// So many bytes for fills, and for reads of compressed clusters.
    pub fn limit(&mut self, bytes: u64) {
        self.disk.fills = fill::Fills::new(bytes);
        self.disk.compressed = CompressedReads::new(bytes);
    }

    /// Submits a write of one sector to each cluster.
    fn write_everywhere(&mut self) {
        for cluster in 0..CLUSTERS {
            let bytes = Segments::copy_of(&[0xee; 512]);
            self.submit(Operation::Write { durable: false }, cluster * CLUSTER + 512, 512, bytes, cluster);
        }
    }

    fn statuses(&mut self) -> Vec<Status> {
        self.answered.drain(..).map(|(_, status, _)| status).collect()
    }

    fn assert_nothing_waits(&self) {
        assert!(self.disk.fills.is_empty() && self.disk.compressed.is_idle() && self.disk.busy.is_empty());
    }
}

/// A leaf on a base all of whose clusters hold data, or compressed data.
fn on_base(packed: bool) -> Rig<Clusters> {
    let (mut base, mut file) = (Clusters::new(CLUSTERS * CLUSTER), Vec::new());
    let put = if packed { Clusters::put_packed } else { Clusters::put };
    (0..CLUSTERS).for_each(|cluster| put(&mut base, &mut file, cluster, cluster as u8));
    let mut rig = Rig::new(vec![Clusters::new(CLUSTERS * CLUSTER), base], vec![Vec::new(), file], 1);
    rig.files.room = 1000;
    rig
}

/// What a cluster holds after [`Rig::write_everywhere`].
fn written(cluster: u64) -> Vec<u8> {
    let mut bytes = content(cluster as u8);
    bytes[512..1024].fill(0xee);
    bytes
}

#[test]
fn fills_take_no_more_memory_than_there_is_and_all_of_them_end() {
    let mut rig = on_base(false);
    rig.read(0, 512);
    rig.limit(3 * AROUND);
    rig.write_everywhere();
    assert_eq!(rig.files.queue.len(), 2 * 3, "three are under way, with a read before the write and one behind");
    while !rig.disk.is_idle() {
        assert!(rig.disk.fills.bytes() <= 3 * AROUND);
        rig.step();
    }
    assert_eq!(rig.statuses(), [Status::Done; CLUSTERS as usize]);
    (0..CLUSTERS).for_each(|cluster| assert_eq!(rig.read(cluster * CLUSTER, CLUSTER), written(cluster)));
    rig.assert_nothing_waits();
}

#[test]
fn the_memory_of_a_fill_is_taken_until_its_write_has_ended() {
    let mut rig = on_base(false);
    rig.read(0, 512);
    rig.limit(AROUND);
    rig.write_everywhere();
    rig.complete(|action| matches!(action, Action::Read { .. }));
    rig.complete(|action| matches!(action, Action::Read { .. }));
    let under_way: Vec<bool> = rig.files.queue.iter().map(|op| matches!(op.action, Action::Write { .. })).collect();
    assert_eq!(under_way, [true]);
    rig.complete(|action| matches!(action, Action::Write { .. }));
    assert_eq!(rig.files.queue.len(), 2, "the next one has begun");
    rig.drain();
}

#[test]
fn compressed_clusters_take_no_more_memory_than_there_is() {
    let mut rig = on_base(true);
    rig.read(0, 512);
    // What is read of each is one sector.
    rig.limit(4 * 512);
    let memory: Vec<Segments> = (0..2 * CLUSTERS).map(|_| Segments::zeroed(512)).collect();
    for (number, memory) in (0..).zip(&memory) {
        // Every cluster twice: the second joins the first, whether that has begun or waits.
        rig.submit(Operation::Read, number % CLUSTERS * CLUSTER, 512, memory.clone(), number);
    }
    assert_eq!(rig.files.queue.len(), 4);
    rig.files.log.clear();
    while !rig.disk.is_idle() {
        assert!(rig.disk.compressed.bytes() <= 4 * 512);
        rig.step();
    }
    assert_eq!(rig.statuses(), [Status::Done; 2 * CLUSTERS as usize]);
    assert_eq!(rig.files.log.len() as u64, CLUSTERS - 4, "each is read once");
    for (number, memory) in memory.iter().enumerate() {
        assert_eq!(memory.to_vec(), [(number as u64 % CLUSTERS) as u8; 512]);
    }
    rig.assert_nothing_waits();
}

#[test]
fn without_any_memory_one_operation_of_each_kind_is_under_way() {
    let mut rig = on_base(true);
    rig.read(0, 512);
    rig.limit(0);
    rig.write_everywhere();
    while !rig.disk.is_idle() {
        assert!(rig.disk.fills.bytes() <= AROUND && rig.disk.compressed.bytes() <= 512);
        rig.step();
    }
    assert_eq!(rig.statuses(), [Status::Done; CLUSTERS as usize]);
    (0..CLUSTERS).for_each(|cluster| assert_eq!(rig.read(cluster * CLUSTER, CLUSTER), written(cluster)));
    rig.assert_nothing_waits();
}

#[test]
fn a_compressed_cluster_that_moves_while_its_reading_waits_is_looked_for_again() {
    let mut rig = on_base(true);
    rig.disk.chain.layers_mut().remove(0);
    rig.disk.chain.at_mut(0).format.read_only = false;
    rig.disk.layers_changed();
    rig.read(20 * CLUSTER, 512);
    rig.limit(512);
    let memory = Segments::zeroed(512);
    rig.submit(Operation::Read, 3 * CLUSTER, 512, Segments::zeroed(512), 1);
    rig.submit(Operation::Read, CLUSTER, 512, memory.clone(), 2);
    let first = rig.files.take(|op| matches!(op.action, Action::Read { .. }));
    assert!(rig.files.queue.iter().all(|op| !matches!(op.action, Action::Read { .. })), "the second waits");
    assert_eq!(rig.ask_meanwhile(Operation::Write { durable: false }, CLUSTER, &content(0x40)), Status::Done);
    assert_eq!(rig.ask_meanwhile(Operation::Flush, 0, &[]), Status::Done);
    assert_eq!(rig.ask_meanwhile(Operation::Write { durable: false }, 5 * CLUSTER, &content(0x50)), Status::Done);
    rig.end(first);
    rig.drain();
    assert_eq!(memory.to_vec(), [0x40; 512]);
    rig.assert_nothing_waits();
}

#[test]
fn a_disk_that_is_held_becomes_quiet_though_much_waits_for_memory() {
    let mut rig = on_base(true);
    rig.limit(0);
    rig.write_everywhere();
    rig.disk.quiesce();
    while !rig.disk.is_quiet() {
        assert!(!rig.files.queue.is_empty(), "nothing is under way, and the disk is not quiet");
        rig.step();
    }
    assert_eq!(rig.statuses(), [Status::Done; CLUSTERS as usize]);
    rig.assert_nothing_waits();
}

#[test]
fn what_waits_for_memory_is_refused_after_a_sync_has_failed() {
    let mut rig = on_base(false);
    rig.write(0, &[1; 512]);
    rig.limit(AROUND);
    rig.write_everywhere();
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 99);
    rig.files.fail_sync = true;
    rig.complete(|action| matches!(action, Action::SyncData));
    rig.drain();
    let refused = rig.statuses().into_iter().filter(|&status| status == Status::Refused).count() as u64;
    assert!(refused >= CLUSTERS - 2, "{refused} are refused");
    rig.assert_nothing_waits();
}

/// The Nth operation fails under writes to parts of clusters, reads and a merge, all of which wait for memory; whether
/// there were so many.
fn run_with_fault(nth: usize, packed: bool) -> bool {
    let mut rig = on_base(packed);
    rig.limit(512);
    rig.files.fail_nth = Some(nth);
    rig.write_everywhere();
    rig.disk.begin_merge(0, 1).unwrap();
    for cluster in 0..CLUSTERS {
        rig.submit(Operation::Read, cluster * CLUSTER, 512, Segments::zeroed(512), 100 + cluster);
    }
    rig.submit(Operation::Discard, 3 * CLUSTER, 5 * CLUSTER, Segments::empty(), 200);
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 201);
    rig.disk.step_merge(&mut rig.files);
    rig.drain();
    while rig.disk.step_merge(&mut rig.files) {
        rig.drain();
    }
    let statuses = rig.statuses();
    assert_eq!(statuses.len() as u64, 2 * CLUSTERS + 2, "operation {nth}");
    let fault = rig.files.fail_nth.take().is_none();
    assert!(fault || statuses.iter().all(|&status| status == Status::Done), "operation {nth}");
    rig.assert_nothing_waits();
    // Memory is there for who comes next.
    let next = rig.write(10 * CLUSTER, &[0xdd; 512]);
    assert_eq!(next, if rig.disk.is_broken() { Status::Refused } else { Status::Done }, "operation {nth}");
    rig.assert_nothing_waits();
    fault
}

/// Scope: the Nth operation fails, reads, writes, deallocations and syncs, for every N.
#[test]
fn a_fault_at_any_operation_gives_the_memory_back() {
    for packed in [false, true] {
        let operations = (0..).take_while(|&nth| run_with_fault(nth, packed)).count();
        assert!(operations > 100, "{operations} operations");
    }
}
