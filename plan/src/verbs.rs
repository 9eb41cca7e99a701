//! The plans. What a crash leaves between two steps is said where it matters.

use crate::Step::*;
use crate::{Plan, Planned};

/// What a merge must know of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Bytes of its disk.
    pub len: u64,
    /// Whether its data is in a file at the same offsets as on the disk: its own, or a data file.
    pub flat: bool,
    /// Whether it is raw, and so as large as its file is long.
    pub raw: bool,
}

/// What is merged.
#[derive(Clone, Copy, Debug)]
pub struct Merge<'a> {
    /// The topmost of the layers that are merged.
    pub from: usize,
    /// The target, below it.
    pub into: usize,
    /// All layers, the leaf first.
    pub layers: &'a [Layer],
    /// Whether the files of the merged layers are removed.
    pub delete: bool,
}

/// A layer that cannot grow: the one below it is longer, and what is hidden behind the end of the upper one would be
/// shown. Such a layer stays as long as it is; a merge does not give its place to the one below it either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exposing {
    /// The upper layer.
    pub depth: usize,
    /// Bytes of its disk.
    pub len: u64,
    /// Bytes of the disk of the one below it.
    pub below: u64,
}

/// A new file becomes the leaf, and the old leaf its read-only parent.
///
/// After a crash the new file is the leaf if it exists, and the old one otherwise: until [`PushLeaf`] the new one is
/// empty, and later nothing in it is durable before the old leaf is. That it exists is durable before the guest writes
/// to it. A map of changed blocks ends, and the next one begins, between two writes of the guest: whatever is written
/// to the new leaf is in the new map.
pub fn snapshot() -> Plan {
    let unused = [Release.into(), RemoveNew.into()];
    let steps = [
        OpenChild.or(&[RemoveNew.into()]),
        Hold.or(&unused),
        PushLeaf.or(&unused),
        SwitchMap.or(&[Release.into()]),
        CloseForWriting.or(&[Release.into()]),
        Release.into(),
        AwaitClosed.into(),
        ReopenReadOnly.into(),
        RecordParentTime.into(),
    ];
    clone_of(0, true).chain(steps).collect()
}

/// A file that shares every block with the leaf, as of one moment; there is no chain.
///
/// After a crash before its end the copy exists, complete, or it does not.
pub fn copy() -> Plan {
    let unused = [Release.into(), RemoveNew.into()];
    let steps = [CreateCopy.into(), HoldDurable.or(&unused), ShareBlocks.or(&unused), Release.into()];
    steps.into_iter().chain(named()).collect()
}

/// An empty child of a layer that is not written to any more, for another disk.
///
/// After a crash before its end the child exists, complete, or it does not.
pub fn clone(of: usize) -> Plan {
    clone_of(of, false).collect()
}

fn clone_of(of: usize, live: bool) -> impl Iterator<Item = Planned> {
    [CreateChild { of, live }.into()].into_iter().chain(named())
}

/// The new file is complete: it becomes durable, and then gets its name.
fn named() -> [Planned; 3] {
    [SyncNew, NameNew, SyncName].map(|step| step.or(&[RemoveNew.into()]))
}

/// The disk becomes what it was when a layer, which is not written to any more, was its leaf.
///
/// After a crash before [`PopTo`] the old chain is unchanged, and the new file is unused; both may be opened, each for
/// what it is. The old one is durable before it is left. A map of changed blocks ends before other contents are shown:
/// a crash behind that costs the map although the disk was not reverted.
pub fn revert(to: usize) -> Plan {
    let unused = [Release.into(), RemoveNew.into()];
    let steps = [
        OpenChild.or(&[RemoveNew.into()]),
        HoldDurable.or(&unused),
        EndMap.or(&unused),
        PopTo { depth: to }.or(&unused),
        PushLeaf.or(&[Release.into()]),
        Announce.or(&[Release.into()]),
        Release.into(),
    ];
    clone_of(to, false).chain(steps).collect()
}

/// The disk of these layers, the leaf first, becomes larger, and what is new reads as zeroes. If its data is in a file
/// at the same offsets, that becomes longer first, while no one reads behind its old end. Before that the map of
/// changed blocks is extended: a raw file that was made longer is a larger disk after a power loss. Refused if
/// something below the leaf would be exposed.
///
/// After a crash the disk has either size. The guest is notified when the new one is durable, since it may use the new
/// space at once.
pub fn resize(len: u64, layers: &[Layer]) -> Result<Plan, Exposing> {
    growing(layers, 0, len)?;
    let release = [Release.into()];
    let lengthen = layers.first().filter(|leaf| leaf.flat).map(|_| Lengthen { depth: 0, len }.into());
    let grow =
        [HoldDurable.or(&release), Grow { len }.or(&release), Release.into(), MakeDurable.into(), Announce.into()];
    Ok([ExtendMap { len }.into()].into_iter().chain(lengthen).chain(grow).collect())
}

/// Whether a layer can grow to `len` bytes: the one below it must not be longer than the layer is now.
fn growing(layers: &[Layer], depth: usize, len: u64) -> Result<(), Exposing> {
    let len_of = |depth: usize| layers.get(depth).map(|layer| layer.len);
    match (len_of(depth), len_of(depth + 1)) {
        (Some(old), Some(below)) if len > old && below > old => Err(Exposing { depth, len: old, below }),
        _ => Ok(()),
    }
}

/// Changes are recorded from now on in a new map of changed blocks.
///
/// The map begins with what the disk shows while requests are held, all of which is durable then. After a crash before
/// [`MarkImage`] the map is refused, and behind it the map is complete.
pub fn track() -> Plan {
    // A mark that stays would have the map trusted, in which nothing is recorded: it goes before a request does.
    let unused = [RemoveMap.into(), Release.into()];
    let held = [HoldDurable.or(&unused), MarkImage.or(&unused), SwitchMap.or(&unused), Release.into()];
    [CreateMap.into()].into_iter().chain(held).collect()
}

/// Changes are not recorded any more. The map says so before the first change that it does not name.
pub fn untrack() -> Plan {
    [Hold.or(&[Release.into()]), EndMap.or(&[Release.into()]), Release.into()].into_iter().collect()
}

/// Requests are held until a client lets them go.
pub fn pause() -> Plan {
    [HoldDurable.or(&[Release.into()])].into_iter().collect()
}

/// Layers are merged into the one below them. Refused if something would be exposed: of a layer that is merged, or of
/// the one below the target, which becomes as long as the first.
///
/// 1. What a killed process has left is made durable. The files are opened for writing, which fails if another disk is
///    based on one of them. Nothing else is written.
/// 2. What children record of a parent that is about to change is forgotten, from the leaf down, each durably before
///    its parent changes, if only because that forgets its own parent. *After a crash:* the same chain opens.
/// 3. The disk uses the files; the layers get the size of the first, from the top down, each durably before the next:
///    at no time is one smaller than the layer below it. A flat target comes last.
/// 4. Chunk by chunk the data moves down. *After a crash:* the same chain, and the merge can be begun again.
/// 5. The sources, which hold nothing any more, leave the chain; the layer above records the target as its parent,
///    durably before their files are removed. *After a crash:* one of the two chains opens; for a merged leaf both do.
pub fn merge(merge: &Merge<'_>) -> Result<Plan, Exposing> {
    let &Merge { from, into, layers, delete } = merge;
    // What is below takes the place of each source, however long that is.
    (from..into).try_for_each(|depth| growing(layers, depth, u64::MAX))?;
    growing(layers, into, layers.get(from).map_or(0, |first| first.len))?;
    let close: Vec<Planned> = vec![
        HoldDurable.or(&[Release.into()]),
        CloseForWriting.or(&[Release.into()]),
        Release.into(),
        ReopenReadOnly.into(),
        RecordParentTime.into(),
    ];
    let untouched = [ReopenReadOnly.into(), RecordParentTime.into()];
    let give_up: Vec<Planned> = [CancelMerge.into()].into_iter().chain(close.clone()).collect();
    let mut steps = vec![
        MakeDurable.into(),
        OpenForWriting { last: into }.into(),
        ForgetParent.or(&untouched),
        MakeDurable.or(&untouched),
        ForgetParents.or(&untouched),
        Hold.or(&give_up),
        UseWritable.or(&give_up),
        Release.into(),
        MakeDurable.or(&give_up),
    ];
    steps.extend(equalize_sizes(merge).map(|step| step.or(&give_up)));
    steps.extend([BeginMerge { from, into }, CopyAll, HoldDurable, EndMerge].map(|step| step.or(&give_up)));
    // The layer above still names the sources if this fails: they must stay.
    steps.extend(from.checked_sub(1).map(|child| LinkParent { child }.or(&close)));
    steps.extend(close);
    steps.extend(delete.then(|| RemoveSources.into()));
    Ok(steps.into_iter().collect())
}

/// What is left of a merge that a killed process has ended but for removing the files of the sources. That the layer
/// above records the target may be known to the page cache only.
pub fn finish_merge(delete: bool) -> Plan {
    [MakeDurable.into()].into_iter().chain(delete.then(|| RemoveSources.into())).collect()
}

/// The leaf gets other parents, on which it shows what it did. Nothing else uses the chain.
///
/// 1. The new parents are made durable: what they show is not copied, and the old ones may be removed at the end.
/// 2. What the old parents show and the new ones do not is copied up. *After a crash:* the old parents, and the same
///    contents; what was copied is the leaf's own when the verb is begun again.
/// 3. That is made durable.
/// 4. The new parent is recorded, and that is made durable. *After a crash:* the old parents or the new ones, with the
///    same contents: neither may be removed or changed before the end.
pub fn rebase() -> Plan {
    [Planned::from(SyncParents)].into_iter().chain(copied_up(LinkParent { child: 0 })).collect()
}

/// The same onto no parents at all.
pub fn flatten() -> Plan {
    copied_up(RemoveParentLink)
}

/// The leaf gets other parents, of which somebody else knows that they show the same: nothing is copied.
pub fn relink() -> Plan {
    [SyncParents, MakeDurable, LinkParent { child: 0 }, MakeDurable].into_iter().map(Planned::from).collect()
}

/// What is left of a rebase or flatten that a killed process has ended. That the leaf stands elsewhere may be known to
/// the page cache only.
pub fn finish_rebase() -> Plan {
    finish_merge(false)
}

fn copied_up(link: crate::Step) -> Plan {
    [CopyUp, MakeDurable, link, MakeDurable].into_iter().map(Planned::from).collect()
}

/// Enlarges the layers that are smaller than the first one.
fn equalize_sizes(merge: &Merge<'_>) -> impl Iterator<Item = crate::Step> {
    let Some(merged) = merge.layers.get(merge.from..=merge.into) else { panic!("{merge:?} names layers that are not") };
    let (wanted, target) = (merged[0].len, merged[merged.len() - 1]);
    let short = (merge.from..).zip(merged).filter(move |(_, layer)| layer.len < wanted && !layer.raw);
    let grow: Vec<_> = short.flat_map(|(depth, _)| [GrowLayer { depth, len: wanted }, MakeDurable]).collect();
    // A raw image is as long as its file. One with a data file has grown by now, and the file has not.
    let is_long = target.raw && target.len >= wanted;
    let lengthen = (target.flat && !is_long).then_some(Lengthen { depth: merge.into, len: wanted });
    grow.into_iter().chain(lengthen)
}
