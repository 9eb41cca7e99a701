//! What is done to a chain of images, and in which order: one plan for each verb.
//!
//! A plan knows the order of its steps, and what follows when one of them fails. It knows no file, disk or clock.
//! The disk process, the image jobs and the simulator carry out the same plans, each with a driver of its own; so the
//! order that the simulator interrupts at every step is the order that is shipped.
//!
//! Layers are numbered from the leaf, 0, down, as they are when the step is carried out.
//!
//! Invariants of every plan, which the simulator checks by power losses and deaths at each step:
//! - a chain opens without an operator, with all that was flushed;
//! - a layer is not written to before its child has, durably, forgotten when it was last changed;
//! - a file is removed only when no chain that may be opened names it;
//! - what is new in a disk or layer that grows reads as zeroes: nothing below it is exposed;
//! - requests that were held are released, also when a step fails.

#![forbid(unsafe_code)]

mod verbs;

use std::collections::VecDeque;

pub use verbs::{
    Exposing, Layer, Merge, clone, copy, finish_merge, finish_rebase, flatten, merge, pause, rebase, relink, resize,
    revert, snapshot, track, untrack,
};

/// One step. A driver carries it out, however long that takes, and then says how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Create the new file: an empty child of a layer, complete, but neither durable nor under its name. `live`: that
    /// layer is written to for a while yet, so the time of its last change is not recorded.
    CreateChild {
        /// The layer.
        of: usize,
        /// Whether it is still written to.
        live: bool,
    },
    /// Create the new file: an empty one, for a copy of the leaf.
    CreateCopy,
    /// Have the copy share all blocks of the leaf.
    ShareBlocks,
    /// Make durable what is in the new file.
    SyncNew,
    /// Give the new file its name, under which there is nothing yet. From here on somebody may open it.
    NameNew,
    /// Make durable that it has its name.
    SyncName,
    /// Open the new file as the disk's own.
    OpenChild,
    /// Remove the new file, durably: it is not used after all.
    RemoveNew,
    /// Make the new parents durable, all of them: the program that wrote them need not have done so.
    SyncParents,
    /// Hold requests, and wait until nothing is in flight. Much may not be durable.
    Hold,
    /// The same, until everything is durable as well.
    HoldDurable,
    /// Let the requests go that were held.
    Release,
    /// Make durable what has changed so far.
    MakeDurable,
    /// The new file becomes the leaf.
    PushLeaf,
    /// Extend the map of changed blocks for a disk of this size, durably. Nothing if there is no map.
    ExtendMap {
        /// The size in bytes.
        len: u64,
    },
    /// Create the file of a new map of changed blocks, durably. The data of earlier processes becomes durable, too.
    CreateMap,
    /// Remove it: it is not used after all.
    RemoveMap,
    /// Have the image show, durably, that its changes are recorded in the new map.
    MarkImage,
    /// Changes are recorded in the new map from now on, if there is one; the old one is sealed in the background.
    /// Requests are held.
    SwitchMap,
    /// Have the map of changed blocks say, durably, that changes are missing: the disk is about to show what was not
    /// recorded. Nothing if there is no map. Requests are held.
    EndMap,
    /// The layers above this one leave the chain.
    PopTo {
        /// The layer that becomes the leaf.
        depth: usize,
    },
    /// Layers below the leaf are not written to any more once they are durable.
    CloseForWriting,
    /// Wait until they are.
    AwaitClosed,
    /// Open them for reading only, so that other disks can be based on them.
    ReopenReadOnly,
    /// The leaf's parent is final: have the leaf record when it was last changed.
    RecordParentTime,
    /// Open the files down to this layer for writing, or none of them. Nothing is written.
    OpenForWriting {
        /// The last of them.
        last: usize,
    },
    /// Have the leaf forget when its parent was last changed, and its size.
    ForgetParent,
    /// Have the layers that were opened for writing do the same, from the top down, each durably before the next.
    ForgetParents,
    /// The disk uses the files that were opened for writing.
    UseWritable,
    /// Enlarge a layer.
    GrowLayer {
        /// Which.
        depth: usize,
        /// Its new size in bytes.
        len: u64,
    },
    /// Make the file that holds a layer's data, at the same offsets as the disk, this long, durably.
    Lengthen {
        /// Which.
        depth: usize,
        /// Bytes.
        len: u64,
    },
    /// Enlarge the disk.
    Grow {
        /// Its new size in bytes.
        len: u64,
    },
    /// Tell the guest that the disk has another size.
    Announce,
    /// Begin to merge layers into the one below them.
    BeginMerge {
        /// The topmost.
        from: usize,
        /// The target.
        into: usize,
    },
    /// Merge chunk by chunk until all is copied.
    CopyAll,
    /// Give the merge up where it is.
    CancelMerge,
    /// The merged layers, which are empty now, leave the chain.
    EndMerge,
    /// Have a layer record its new parent: the target of a merge, or what it is rebased onto.
    LinkParent {
        /// That layer.
        child: usize,
    },
    /// Have the leaf record that it has no parent.
    RemoveParentLink,
    /// Copy into the leaf what it shows of its parents and would not show on the new ones, or on none.
    CopyUp,
    /// Remove the files of the merged layers.
    RemoveSources,
}

/// A step, and what is done instead of all that would follow, if it fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The step.
    pub step: Step,
    /// What follows its failure.
    pub otherwise: Vec<Planned>,
}

impl Step {
    /// After a failure of this step, these follow.
    pub fn or(self, otherwise: &[Planned]) -> Planned {
        Planned { step: self, otherwise: otherwise.to_vec() }
    }
}

/// Where a failure is not followed by anything.
impl From<Step> for Planned {
    fn from(step: Step) -> Planned {
        step.or(&[])
    }
}

/// The steps that are left of a verb, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    left: VecDeque<Planned>,
}

impl Plan {
    /// The step that is to be carried out now. `None`: there is nothing left to do.
    pub fn step(&self) -> Option<Step> {
        self.left.front().map(|planned| planned.step)
    }

    /// The step was carried out; the next one is due.
    pub fn done(&mut self) {
        let done = self.left.pop_front();
        assert!(done.is_some(), "a step ended that was never planned");
    }

    /// The step has failed: what follows takes back what can be taken back.
    pub fn fail(&mut self) {
        let Some(failed) = self.left.pop_front() else { panic!("a step failed that was never planned") };
        self.left = failed.otherwise.into();
    }
}

impl FromIterator<Planned> for Plan {
    fn from_iter<T: IntoIterator<Item = Planned>>(steps: T) -> Plan {
        Plan { left: steps.into_iter().collect() }
    }
}

impl IntoIterator for Plan {
    type Item = Planned;
    type IntoIter = std::collections::vec_deque::IntoIter<Planned>;

    fn into_iter(self) -> Self::IntoIter {
        self.left.into_iter()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn all(mut plan: Plan, fails_at: Option<Step>) -> Vec<Step> {
        let mut taken = Vec::new();
        while let Some(step) = plan.step() {
            taken.push(step);
            if Some(step) == fails_at { plan.fail() } else { plan.done() }
        }
        taken
    }

    #[test]
    fn steps_follow_each_other_and_a_failure_leads_elsewhere() {
        let plan: Plan = [Step::Hold.or(&[Step::Release.into()]), Step::PushLeaf.into()].into_iter().collect();
        assert_eq!(all(plan.clone(), None), [Step::Hold, Step::PushLeaf]);
        assert_eq!(all(plan.clone(), Some(Step::Hold)), [Step::Hold, Step::Release]);
        assert_eq!(all(plan, Some(Step::PushLeaf)), [Step::Hold, Step::PushLeaf]);
    }

    /// Every plan, with each of its steps failing.
    #[test]
    fn requests_that_are_held_are_released_whichever_step_fails() {
        let layers = [Layer { len: 8, flat: false, raw: false }, Layer { len: 4, flat: true, raw: true }];
        let deep = [layers[0], layers[0], layers[1]];
        let merges = [
            merge(&Merge { from: 0, into: 1, layers: &layers, delete: true }).unwrap(),
            merge(&Merge { from: 1, into: 2, layers: &deep, delete: true }).unwrap(),
        ];
        let grown = resize(8, &layers[1..]).unwrap();
        let others =
            [snapshot(), revert(1), clone(1), copy(), grown, rebase(), flatten(), relink(), track(), untrack()];
        for plan in merges.into_iter().chain(others) {
            let steps: Vec<Step> = plan.clone().into_iter().map(|planned| planned.step).collect();
            for fails_at in steps.iter().copied().map(Some).chain([None]) {
                let taken = all(plan.clone(), fails_at);
                let held = taken.iter().rposition(|step| matches!(step, Step::Hold | Step::HoldDurable));
                let released = taken.iter().rposition(|step| *step == Step::Release);
                assert!(held <= released, "{fails_at:?} fails: {taken:?}");
            }
        }
    }

    /// A layer: what each of its bytes holds, if it holds it.
    type Bytes = Vec<Option<usize>>;

    /// What a chain shows, the leaf first: a layer shows what it does not hold of the one below it, and zero where that
    /// has ended.
    fn shown(chain: &[Bytes], at: usize) -> usize {
        let there = chain.iter().map_while(|layer| layer.get(at));
        there.flatten().next().copied().unwrap_or(0)
    }

    /// All chains of three layers with lengths of 1 to 3, of which some hold everything.
    fn chains() -> impl Iterator<Item = [Bytes; 3]> {
        let layer = |n: usize, depth: usize| vec![(n / 3 == 1).then_some(depth + 1); n % 3 + 1];
        (0..216).map(move |n| [layer(n % 6, 0), layer(n / 6 % 6, 1), layer(n / 36, 2)])
    }

    fn layers_of(chain: &[Bytes]) -> Vec<Layer> {
        chain.iter().map(|layer| Layer { len: layer.len() as u64, flat: false, raw: false }).collect()
    }

    #[test]
    fn a_resize_is_refused_exactly_where_it_could_expose_a_parent() {
        for chain in chains() {
            let mut grown = chain.clone();
            grown[0].resize(4, None);
            let old = chain[0].len();
            let exposes = (old..4).any(|at| shown(&grown, at) != 0);
            let refused = resize(4, &layers_of(&chain)).is_err();
            assert!(refused || !exposes, "{chain:?}");
            assert_eq!(refused, chain[1].len() > old, "{chain:?}");
            assert_eq!(resize(old as u64, &layers_of(&chain)).err(), None, "{chain:?} does not grow");
        }
    }

    #[test]
    fn a_merge_that_is_not_refused_leaves_what_the_chain_shows() {
        let mut merged = 0;
        for (chain, (from, into)) in chains().flat_map(|chain| [(0, 1), (0, 2), (1, 2)].map(|two| (chain.clone(), two)))
        {
            let layers = layers_of(&chain);
            let Ok(plan) = merge(&Merge { from, into, layers: &layers, delete: false }) else { continue };
            merged += 1;
            let mut grown = chain.clone();
            for planned in plan {
                if let Step::GrowLayer { depth, len } = planned.step {
                    grown[depth].resize(usize::try_from(len).unwrap(), None);
                }
            }
            let target = (0..grown[into].len()).map(|at| grown[from..=into].iter().find_map(|layer| layer[at]));
            let target: Bytes = target.collect();
            let after: Vec<Bytes> = grown[..from].iter().chain([&target]).chain(&grown[into + 1..]).cloned().collect();
            for at in 0..chain[0].len() {
                assert_eq!(shown(&after, at), shown(&chain, at), "{chain:?}, {from} into {into}: {at}");
            }
        }
        assert!(merged > 100);
    }
}
