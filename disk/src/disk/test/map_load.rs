//! Learning the map from formats that make it hard.

use super::*;
use crate::{DiskOffset, FileOffset, FileRange, Records, Stamp};

/// A layout in which every sector lives somewhere else, so that the map soon has to forget, and of which metadata is
/// to be loaded once for every 1024 chunks.
struct Scattered {
    loaded: std::collections::HashSet<u64>,
    records: Records,
}

const EVERY: u64 = 1024 * (2 << 20);

impl Format for Scattered {
    fn geometry(&self) -> Geometry {
        Geometry { len: 32 * EVERY, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: true }
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        let which = span.at / EVERY;
        if !self.loaded.contains(&which) {
            return Err(Wait::Load(MetaBlock { at: FileOffset(which * 512), len: 512 }));
        }
        Ok(Mapping::Data { at: FileOffset(span.at.0 * 2), len: 512.min(span.len) })
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        Ok(span.len)
    }

    fn grow(&mut self, _len: u64) -> Result<(), ImageError> {
        Ok(())
    }

    fn decompress(&self, _bytes: &[u8]) -> Result<Vec<u8>, crate::Corrupt> {
        Err(crate::Corrupt { at: FileOffset(0) })
    }

    fn load(&mut self, block: MetaBlock, _bytes: &[u8]) -> Result<(), crate::Corrupt> {
        self.loaded.insert(block.at / 512);
        Ok(())
    }

    fn records(&mut self) -> &mut Records {
        &mut self.records
    }

    fn collect_records(&mut self) {}

    fn set_stamp(&mut self, _stamp: Stamp) -> Option<MetaWrite> {
        None
    }

    fn clear_stamp(&mut self) {}

    fn dirty(&self) -> usize {
        0
    }

    fn reserve(&mut self, _: Span) -> Result<crate::Reserved, Wait> {
        unreachable!("nothing is written")
    }

    fn commit(&mut self, _: Ticket) -> Option<crate::Committed> {
        unreachable!("nothing is written")
    }

    fn abandon(&mut self, _: Ticket) {
        unreachable!("nothing is written")
    }

    fn discard(&mut self, _: Span) -> Result<crate::Discarded, Wait> {
        unreachable!("nothing is written")
    }

    fn released(&mut self, _: FileOffset, _: bool) {}

    fn reclaim(&mut self) -> Option<FileRange> {
        None
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        Vec::new()
    }

    fn settled(&mut self, _: bool) {}
}

#[test]
fn a_chunk_forgotten_while_a_request_goes_on_makes_nobody_wait() {
    let mut files = MemoryIo::random(vec![Vec::new()], 1);
    let mut disk =
        Disk::new(vec![Scattered { loaded: Default::default(), records: Records::default() }], Options::default())
            .unwrap();
    let span = Span { at: DiskOffset(0), len: EVERY };
    let request =
        Request::new(Operation::Extents { depths: false }, span, Segments::empty(), Token(1), &disk.geometry())
            .unwrap();
    disk.submit(request, &mut files);
    while !files.queue.is_empty() {
        let mut done = Vec::new();
        files.reap(Until::Now, &mut done).unwrap();
        done.into_iter().for_each(|done| disk.settle(done, &mut files));
    }
    let (request, status) = disk.answer().unwrap();
    request.retire();
    assert_eq!(status, Status::Done);
    assert!(disk.map.lookup(DiskOffset(0)).is_none(), "the first chunk is forgotten by now");
    assert!(disk.map_loader.is_over(), "its turn to learn is over");
}

/// A cache that holds just what one chunk needs, and reads of many chunks at once, which take it from each other.
#[test]
fn grains_that_take_the_cache_from_each_other_are_learned_all_the_same() {
    use super::clusters::Clusters;
    const GRAINS: u64 = 40;
    for seed in 0..4 {
        let layer = || {
            let mut layer = Clusters::new(GRAINS * 2 * MIB);
            layer.known_max = 8;
            layer
        };
        let mut rig = Rig::new(vec![layer(), layer(), layer()], vec![Vec::new(), Vec::new(), Vec::new()], seed);
        rig.files.room = 64;
        for chunk in 0..GRAINS {
            rig.submit(Operation::Read, chunk * 2 * MIB, 512, Segments::zeroed(512), chunk);
        }
        let mut steps = 0;
        while !rig.disk.is_idle() {
            rig.step();
            steps += 1;
            assert!(steps < 100_000, "{} of {GRAINS} reads have ended", rig.answered.len());
        }
        assert_eq!(rig.answered.len() as u64, GRAINS);
        assert!(rig.answered.iter().all(|(_, status, _)| *status == Status::Done));
    }
}
