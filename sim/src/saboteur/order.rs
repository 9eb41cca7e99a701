//! Bugs planted in the order of a verb: a step is omitted or comes too early.

use plan::{Plan, Planned as Step, Step as Do};

use crate::planted::Planted;

/// The plan with the bug, if that affects the order.
pub fn plant(plan: Plan, bug: Option<Planted>) -> Plan {
    let mut steps: Vec<Step> = plan.into_iter().collect();
    match bug {
        Some(Planted::SourcesRemovedFirst) => {
            let remove = position(&steps, |step| step == Do::RemoveSources);
            let link = position(&steps, |step| matches!(step, Do::LinkParent { .. }));
            if let (Some(remove), Some(link)) = (remove, link) {
                let removed = steps.remove(remove);
                steps.insert(link, removed);
            }
        }
        Some(Planted::LinkNotDurable) => {
            let link = position(&steps, |step| matches!(step, Do::LinkParent { .. }));
            let round = steps.iter().rposition(|step| step.step == Do::HoldDurable);
            if let (Some(link), Some(round)) = (link, round) {
                // And the step that needs the disk to be drained.
                steps.drain(link + 1..=round + 1);
            }
        }
        Some(Planted::FinishedUndurably) if begins_durable(&steps) && !opens(&steps) => {
            steps.remove(0);
        }
        Some(Planted::MergedBeforeReplay) if begins_durable(&steps) && opens(&steps) => {
            steps.remove(0);
        }
        Some(Planted::ParentNeverForgotten) => steps.retain(|step| step.step != Do::ForgetParent),
        Some(Planted::ParentsNeverForgotten) => steps.retain(|step| step.step != Do::ForgetParents),
        Some(Planted::ParentForgottenLate) => {
            remove_sync_after(&mut steps, |step| step == Do::ForgetParent);
        }
        Some(Planted::LayersGrowTogether) => {
            while remove_sync_after(&mut steps, |step| matches!(step, Do::GrowLayer { .. })) {}
        }
        Some(Planted::LinkedBeforeCopy) => {
            let copy = position(&steps, |step| step == Do::CopyUp);
            if let Some((copy, link)) = copy.zip(position(&steps, is_link)) {
                let linked = steps.remove(link);
                steps.insert(copy, linked);
            }
        }
        Some(Planted::LinkedWithCopy) => {
            remove_sync_after(&mut steps, |step| step == Do::CopyUp);
        }
        Some(Planted::MoveNotDurable) => {
            remove_sync_after(&mut steps, is_link);
        }
        Some(Planted::ChildNamedEarly | Planted::CopyNamedEarly) => named_early(&mut steps),
        Some(Planted::NameNotDurable) if becomes_leaf(&steps) => steps.retain(|step| step.step != Do::SyncName),
        Some(Planted::CloneNotDurable) if !becomes_leaf(&steps) => steps.retain(|step| step.step != Do::SyncName),
        Some(Planted::RevertedEarly) if position(&steps, |step| matches!(step, Do::PopTo { .. })).is_some() => {
            steps.iter_mut().filter(|step| step.step == Do::HoldDurable).for_each(|step| step.step = Do::Hold);
        }
        Some(Planted::ParentsNotSynced) => steps.retain(|step| step.step != Do::SyncParents),
        _ => {}
    }
    steps.into_iter().collect()
}

/// Moves the naming of the new file before its sync.
fn named_early(steps: &mut [Step]) {
    let sync = position(steps, |step| step == Do::SyncNew);
    if let Some((sync, name)) = sync.zip(position(steps, |step| step == Do::NameNew)) {
        steps.swap(sync, name);
    }
}

/// Whether the new file becomes the disk's leaf.
fn becomes_leaf(steps: &[Step]) -> bool {
    position(steps, |step| step == Do::PushLeaf).is_some()
}

fn begins_durable(steps: &[Step]) -> bool {
    steps.first().is_some_and(|step| step.step == Do::MakeDurable)
}

/// Whether it is a merge from its beginning.
fn opens(steps: &[Step]) -> bool {
    steps.iter().any(|step| matches!(step.step, Do::OpenForWriting { .. }))
}

fn is_link(step: Do) -> bool {
    matches!(step, Do::LinkParent { .. } | Do::RemoveParentLink)
}

fn position(steps: &[Step], which: impl Fn(Do) -> bool) -> Option<usize> {
    steps.iter().position(|step| which(step.step))
}

/// Removes the sync that follows the first step chosen by `which`. Returns false if no such step has one.
fn remove_sync_after(steps: &mut Vec<Step>, which: impl Fn(Do) -> bool) -> bool {
    let found = steps.windows(2).position(|pair| which(pair[0].step) && pair[1].step == Do::MakeDurable);
    found.map(|at| steps.remove(at + 1)).is_some()
}
