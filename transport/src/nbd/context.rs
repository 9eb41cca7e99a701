//! Metadata contexts ("Metadata querying"; QEMU's docs/interop/nbd.txt): their names and ids, and sets of them.
//!
//! It knows nothing about exports, negotiation and replies, nor about what a bitmap means. Invariant: the id of a
//! context depends only on its kind and, for a dirty bitmap, on its place in the export's list, so clients that another
//! process takes over keep their ids.

use disk::Span;

/// The maximum number of dirty bitmaps of an export: each is a bit of the state that is handed over.
pub const BITMAPS_MAX: usize = 16;
/// The maximum length of a dirty bitmap's name, as in QEMU.
pub const BITMAP_NAME_MAX: usize = 1023;

pub(super) const ALLOCATION: &str = "base:allocation";
pub(super) const DEPTH: &str = "qemu:allocation-depth";
/// In front of the name of a bitmap.
pub(super) const BITMAP: &str = "qemu:dirty-bitmap:";

/// The dirty bitmaps of an export ([`super::Export::bitmaps`]), as they are at one moment.
pub trait Bitmaps {
    /// Describes `span` in the bitmap with this index, from its beginning: the lengths of successive runs, and whether
    /// they are dirty. There is at least one run, and at most `most`, each of at least one byte; the last may end
    /// before the span does.
    fn runs(&self, index: usize, span: Span, most: usize) -> Vec<(u64, bool)>;
}

/// Bitmaps of which nothing is known: everything may be dirty.
#[derive(Clone, Copy, Debug)]
pub struct AllDirty;

impl Bitmaps for AllDirty {
    fn runs(&self, _: usize, span: Span, _: usize) -> Vec<(u64, bool)> {
        vec![(span.len, true)]
    }
}

/// A metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Context {
    /// `base:allocation`.
    Allocation,
    /// `qemu:allocation-depth`.
    Depth,
    /// `qemu:dirty-bitmap:` followed by the name of the bitmap with this index.
    Bitmap(usize),
}

impl Context {
    /// The id in replies.
    pub(super) fn id(self) -> u32 {
        match self {
            Context::Allocation => 1,
            Context::Depth => 2,
            Context::Bitmap(index) => u32::try_from(index).unwrap_or(u32::MAX).saturating_add(3),
        }
    }

    /// The context with this id, whether or not an export has it.
    pub(super) fn of_id(id: u32) -> Option<Context> {
        match id {
            0 => None,
            1 => Some(Context::Allocation),
            2 => Some(Context::Depth),
            _ => usize::try_from(id - 3).ok().filter(|index| *index < BITMAPS_MAX).map(Context::Bitmap),
        }
    }

    /// The queries of NBD_OPT_LIST_META_CONTEXT that select this context among others.
    fn groups(self) -> &'static [&'static str] {
        match self {
            Context::Allocation => &["base:"],
            Context::Depth => &["qemu:"],
            Context::Bitmap(_) => &["qemu:", BITMAP],
        }
    }

    /// Returns true if this query of NBD_OPT_LIST_META_CONTEXT selects the context, which has this name.
    pub(super) fn is_listed_by(self, query: &[u8], name: &str) -> bool {
        query == name.as_bytes() || self.groups().iter().any(|group| query == group.as_bytes())
    }
}

/// A set of contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Contexts(u32);

impl Contexts {
    #[cfg(test)]
    pub(super) const NONE: Contexts = Contexts(0);
    #[cfg(test)]
    pub(super) const ALLOCATION: Contexts = Contexts(1 << 1);
    #[cfg(test)]
    pub(super) const DEPTH: Contexts = Contexts(1 << 2);
    #[cfg(test)]
    pub(super) const BOTH: Contexts = Contexts(1 << 1 | 1 << 2);

    /// The set with this context added.
    #[must_use]
    pub(super) fn with(self, context: Context) -> Contexts {
        Contexts(self.0 | bit(context))
    }

    pub(super) fn has(self, context: Context) -> bool {
        self.0 & bit(context) != 0
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number of contexts.
    pub(super) fn len(self) -> usize {
        self.iter().count()
    }

    /// The contexts, in the order of their ids.
    pub(super) fn iter(self) -> impl Iterator<Item = Context> {
        (1..=u32::BITS).filter_map(Context::of_id).filter(move |context| self.has(*context))
    }

    /// The dirty bitmaps among them, as a bit for each index.
    pub(super) fn bitmaps(self) -> u16 {
        let indices = self.iter().filter_map(|context| match context {
            Context::Bitmap(index) => Some(index),
            Context::Allocation | Context::Depth => None,
        });
        indices.fold(0, |bits, index| bits | 1 << index)
    }
}

impl FromIterator<Context> for Contexts {
    fn from_iter<I: IntoIterator<Item = Context>>(contexts: I) -> Contexts {
        contexts.into_iter().fold(Contexts::default(), Contexts::with)
    }
}

fn bit(context: Context) -> u32 {
    1u32.checked_shl(context.id()).unwrap_or(0)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn each_context_has_an_id_of_its_own_and_is_found_by_it() {
        let all = [Context::Allocation, Context::Depth].into_iter().chain((0..BITMAPS_MAX).map(Context::Bitmap));
        let all: Vec<Context> = all.collect();
        let set: Contexts = all.iter().copied().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), all);
        assert_eq!((set.len(), set.bitmaps()), (all.len(), u16::MAX));
        for context in all {
            assert_eq!(Context::of_id(context.id()), Some(context));
        }
        for id in [0, 3 + u32::try_from(BITMAPS_MAX).unwrap(), u32::MAX] {
            assert_eq!(Context::of_id(id), None, "{id}");
        }
    }
}
