//! Which images of a repository can be merged: the tree of its images, and the runs in it (see the head of `merge`).
//!
//! Looks at the catalogue's records only, and changes nothing.

use std::collections::{HashMap, HashSet};

use repo::catalogue::{Image, ImageState};
use uuid::Uuid;

use super::Merge;

/// The images of a repository as a tree.
pub struct Tree<'a> {
    by_uuid: HashMap<Uuid, &'a Image>,
    children: HashMap<Uuid, Vec<Uuid>>,
    shown_by: &'a HashMap<Uuid, Uuid>,
    tracked: &'a Tracked,
}

/// Leaves whose changed blocks are recorded.
#[derive(Debug, Default)]
pub struct Tracked {
    /// All of them: another image cannot take the place of one of them.
    pub all: HashSet<Uuid>,
    /// Those of disks that are not plugged, to which nothing may be written: not even another parent.
    pub halted: HashSet<Uuid>,
}

impl<'a> Tree<'a> {
    /// The tree of these images; `shown_by` has the VDIs of those that have one.
    pub fn of(images: &'a [Image], shown_by: &'a HashMap<Uuid, Uuid>, tracked: &'a Tracked) -> Tree<'a> {
        let mut children: HashMap<Uuid, Vec<Uuid>> = HashMap::new();
        for image in images {
            if let Some(parent) = image.parent {
                children.entry(parent).or_default().push(image.uuid);
            }
        }
        Tree { by_uuid: images.iter().map(|image| (image.uuid, image)).collect(), children, shown_by, tracked }
    }

    /// The images directly on top of one.
    pub fn children(&self, image: Uuid) -> &[Uuid] {
        self.children.get(&image).map_or(&[], Vec::as_slice)
    }

    /// Whether a scan has added it as hidden, so that its users are unknown.
    fn is_kept(&self, image: Uuid) -> bool {
        self.by_uuid.get(&image).is_some_and(|image| image.kept)
    }

    /// Whether the image is needed only by its single child.
    fn is_passed_through(&self, image: Uuid) -> bool {
        let ready = self.by_uuid.get(&image).is_some_and(|image| image.state == ImageState::Ready && !image.kept);
        ready && !self.shown_by.contains_key(&image) && self.children(image).len() == 1
    }

    /// The run whose lowest image is `target`, if there is one.
    fn run(&self, target: Uuid) -> Option<Merge> {
        let image = self.by_uuid.get(&target)?;
        if !self.is_passed_through(target) || image.parent.is_some_and(|parent| self.is_passed_through(parent)) {
            return None;
        }
        let mut upwards = Vec::new();
        let mut head = *self.children(target).first()?;
        while self.is_passed_through(head) {
            upwards.push(head);
            head = *self.children(head).first()?;
        }
        if self.is_kept(head) {
            return None;
        }
        let (mut vdi, mut above) = match self.children(head) {
            // The head has several children, each of which would need a new parent: it stays, and is rebased onto the
            // target.
            [_, _, ..] if upwards.is_empty() => return None,
            [_, _, ..] => (None, Some(head)),
            [] if self.tracked.all.contains(&head) && upwards.is_empty() => return None,
            [] if self.tracked.all.contains(&head) => (None, Some(head)),
            on_head => {
                upwards.push(head);
                (self.shown_by.get(&head).copied(), on_head.first().copied())
            }
        };
        if above.is_some_and(|above| self.is_kept(above)) {
            return None;
        }
        if above.is_some_and(|above| self.tracked.halted.contains(&above)) {
            // The image below it gets the new parent, so the chain has a bounded length whatever is destroyed; but not
            // that of a snapshot, whose mark proves a map and would be removed.
            (vdi, above) = (None, upwards.pop().filter(|image| !self.shown_by.contains_key(image)));
            if upwards.is_empty() || above.is_none() {
                return None;
            }
        }
        upwards.reverse();
        Some(Merge { sr: image.sr, sources: upwards, target, above, vdi, vbd: None, live: None })
    }
}

/// All merges that would shorten a chain.
pub fn runs(images: &[Image], shown_by: &HashMap<Uuid, Uuid>, tracked: &Tracked) -> Vec<Merge> {
    let tree = Tree::of(images, shown_by, tracked);
    images.iter().filter_map(|image| tree.run(image.uuid)).collect()
}

#[cfg(test)]
mod test {
    use api::ImageFormat;

    use super::*;

    /// Images `n` on `m` for each pair, all of one repository; those in `shown` have a VDI of the same number.
    fn tree(pairs: &[(u128, Option<u128>)], shown: &[u128]) -> (Vec<Image>, HashMap<Uuid, Uuid>) {
        let image = |(n, parent): &(u128, Option<u128>)| {
            let parent = parent.map(Uuid::from_u128);
            Image::new(Uuid::from_u128(*n), Uuid::nil(), ImageFormat::Qcow2, 1 << 30, parent)
        };
        let vdi = |n: &u128| (Uuid::from_u128(*n), Uuid::from_u128(1000 + *n));
        (pairs.iter().map(image).collect(), shown.iter().map(vdi).collect())
    }

    /// Sources, target, above and VDI of a run.
    type Plain = (Vec<u128>, u128, Option<u128>, Option<u128>);

    fn found(pairs: &[(u128, Option<u128>)], shown: &[u128]) -> Vec<Plain> {
        let (images, shown) = tree(pairs, shown);
        let plain = |merge: Merge| {
            let sources = merge.sources.iter().map(Uuid::as_u128).collect();
            (
                sources,
                merge.target.as_u128(),
                merge.above.map(|uuid| uuid.as_u128()),
                merge.vdi.map(|uuid| uuid.as_u128()),
            )
        };
        runs(&images, &shown, &Tracked::default()).into_iter().map(plain).collect()
    }

    #[test]
    fn a_leaf_is_merged_into_the_hidden_images_below_it() {
        let pairs = [(1, None), (2, Some(1)), (3, Some(2))];
        assert_eq!(found(&pairs, &[3]), [(vec![3, 2], 1, None, Some(1003))]);
    }

    #[test]
    fn images_of_vdis_or_with_several_children_stay() {
        assert_eq!(found(&[(1, None), (2, Some(1)), (3, Some(2))], &[1, 2, 3]), []);
        assert_eq!(found(&[(1, None), (2, Some(1)), (3, Some(1))], &[2, 3]), []);
    }

    #[test]
    fn a_run_below_a_snapshot_is_merged_and_its_child_relinked() {
        // 2 is a snapshot, 3 the disk on it.
        let pairs = [(1, None), (2, Some(1)), (3, Some(2))];
        assert_eq!(found(&pairs, &[2, 3]), [(vec![2], 1, Some(3), Some(1002))]);
    }

    #[test]
    fn hidden_images_below_a_branching_one_are_merged() {
        let many = [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(3))];
        assert_eq!(found(&many, &[3, 4, 5]), [(vec![2], 1, Some(3), None)]);
        let one = [(1, None), (3, Some(1)), (4, Some(3)), (5, Some(3))];
        assert_eq!(found(&one, &[3, 4, 5]), []);
    }

    #[test]
    fn images_added_as_hidden_take_no_part_in_merges() {
        let pairs = [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(4))];
        for (kept, shown) in (1..=4).flat_map(|kept| [(kept, vec![5]), (kept, vec![3, 5])]) {
            let (mut images, shown) = tree(&pairs, &shown);
            images.iter_mut().filter(|image| image.uuid.as_u128() == kept).for_each(|image| image.kept = true);
            for merge in runs(&images, &shown, &Tracked::default()) {
                let all = merge.sources.iter().chain([&merge.target]).chain(&merge.above);
                assert!(all.into_iter().all(|image| image.as_u128() != kept), "{kept}: {merge:?}");
            }
        }
    }

    #[test]
    fn a_tracked_leaf_stays_and_is_not_written_to_while_it_is_halted() {
        let pairs = [(1, None), (2, Some(1)), (3, Some(2))];
        let (images, shown) = tree(&pairs, &[3]);
        let leaf = HashSet::from([Uuid::from_u128(3)]);
        let live = Tracked { all: leaf.clone(), halted: HashSet::new() };
        let found = runs(&images, &shown, &live);
        let [Merge { sources, target, above, vdi, .. }] = &found[..] else { panic!("{found:?}") };
        assert_eq!((&sources[..], target.as_u128()), (&[Uuid::from_u128(2)][..], 1));
        assert_eq!((above.map(|uuid| uuid.as_u128()), *vdi), (Some(3), None));
        assert_eq!(runs(&images, &shown, &Tracked { all: leaf.clone(), halted: leaf.clone() }), []);
        // The topmost hidden image is rebased in place of the leaf, but never that of a snapshot.
        let pairs = [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3))];
        let leaf = HashSet::from([Uuid::from_u128(4)]);
        let halted = Tracked { all: leaf.clone(), halted: leaf };
        let (images, shown) = tree(&pairs, &[4]);
        let found = runs(&images, &shown, &halted);
        let [Merge { sources, target, above, vdi, .. }] = &found[..] else { panic!("{found:?}") };
        assert_eq!((&sources[..], target.as_u128()), (&[Uuid::from_u128(2)][..], 1));
        assert_eq!((above.map(|uuid| uuid.as_u128()), *vdi), (Some(3), None));
        let (images, shown) = tree(&pairs, &[3, 4]);
        assert_eq!(runs(&images, &shown, &halted), []);
        let (images, shown) = tree(&pairs[..2], &[2]);
        let leaf = HashSet::from([Uuid::from_u128(2)]);
        assert_eq!(runs(&images, &shown, &Tracked { all: leaf, halted: HashSet::new() }), []);
    }

    #[test]
    fn runs_in_different_chains_are_separate() {
        let pairs = [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(4))];
        assert_eq!(found(&pairs, &[2, 3, 5]), [(vec![2], 1, Some(3), Some(1002)), (vec![5], 4, None, Some(1005))],);
    }
}
