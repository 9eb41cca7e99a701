//! Compares the layers reported by a running disk with the catalogue: a pure function.
//!
//! The disk takes precedence, because it is what its guest reads and writes. A difference is applied if it leaves no
//! other VDI in doubt; otherwise it is reported and nothing is changed.

use std::collections::HashMap;

use api::ImageFormat;
use repo::catalogue::{Image, ImageState};
use uuid::Uuid;

use crate::disk::names::ServedLayer;

/// The catalogue's relevant data about a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedChain {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// Its images, from the top down.
    pub chain: Vec<Image>,
    /// All images of the repository, by file.
    pub by_file: HashMap<String, Image>,
    /// VDIs by their leaf image, and whether they are writable.
    pub shown: HashMap<Uuid, (Uuid, bool)>,
}

/// The result of the comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They agree.
    Agree,
    /// It is certain what happened: the catalogue is to be updated.
    Follow(Follow),
    /// It is uncertain what happened, with the reason.
    Diverged(String),
}

/// The update for the catalogue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Follow {
    /// The images of the disk, from the top down, as they are to be recorded. Those missing from the catalogue are
    /// new.
    pub chain: Vec<Image>,
    /// Those without a VDI that were not hidden on purpose: snapshots of which only the file is known.
    pub kept: Vec<Uuid>,
    /// Images of the old chain that are no longer part of the disk and belong to nothing else.
    pub left: Vec<Image>,
    /// Images of other VDIs that were based on, or were, images no longer in the disk's chain: their contents may
    /// have changed.
    pub doubtful: Vec<Uuid>,
}

/// Whether a chain matches the disk's layers: the same files, and a leaf of the same size.
pub fn agree(chain: &[Image], layers: &[ServedLayer]) -> bool {
    let mut pairs = chain.iter().zip(layers);
    let same = chain.len() == layers.len() && pairs.clone().all(|(image, layer)| layer.names(&image.file));
    same && pairs.next().is_some_and(|(image, layer)| image.size == layer.size)
}

/// Compares the catalogue with the disk's `layers`, from the leaf down.
pub fn judge(recorded: &RecordedChain, layers: &[ServedLayer]) -> Verdict {
    if agree(&recorded.chain, layers) {
        return Verdict::Agree;
    }
    match follow(recorded, layers).and_then(must_be_certain) {
        Ok(follow) => Verdict::Follow(follow),
        Err(why) => Verdict::Diverged(why),
    }
}

/// The update for the catalogue if the disk's report is accepted regardless of the images that are then doubtful; or
/// why that is impossible.
pub fn follow(recorded: &RecordedChain, layers: &[ServedLayer]) -> Result<Follow, String> {
    let chain = chain(recorded, layers)?;
    let has = |images: &[Image], uuid: Uuid| images.iter().any(|image| image.uuid == uuid);
    let others = |image: &Image| recorded.shown.get(&image.uuid).is_some_and(|(vdi, _)| *vdi != recorded.vdi);
    let was_leaf = recorded.chain.first().map(|image| image.uuid);
    let unclaimed = |image: &&Image| {
        !others(image) && (Some(image.uuid) == was_leaf || !recorded.by_file.contains_key(&image.file))
    };
    let kept = chain.iter().skip(1).filter(unclaimed).map(|image| image.uuid).collect();
    let gone: Vec<Image> = recorded.chain.iter().filter(|image| !has(&chain, image.uuid)).cloned().collect();
    let elsewhere = recorded.by_file.values().filter(|image| !has(&gone, image.uuid) && !has(&chain, image.uuid));
    let above: Vec<Image> =
        elsewhere.filter(|image| image.parent.is_some_and(|parent| has(&gone, parent))).cloned().collect();
    let needed = |image: &Image| others(image) || above.iter().any(|other| other.parent == Some(image.uuid));
    let (needed, left): (Vec<Image>, Vec<Image>) = gone.into_iter().partition(needed);
    let mut doubtful: Vec<Uuid> = needed.iter().chain(&above).map(|image| image.uuid).collect();
    if !recorded.chain.iter().any(|image| has(&chain, image.uuid)) {
        // Nothing in common: the previous leaf may still be in use.
        doubtful.extend(was_leaf);
    }
    let left = left.into_iter().filter(|image| !doubtful.contains(&image.uuid)).collect();
    Ok(Follow { chain, kept, left, doubtful })
}

/// Refuses an update that leaves another VDI in doubt.
fn must_be_certain(follow: Follow) -> Result<Follow, String> {
    match follow.doubtful.first() {
        None => Ok(follow),
        Some(image) => {
            Err(format!("image {image} is no longer part of the disk's chain, and its contents may have changed"))
        }
    }
}

/// The images of the disk, from the top down.
fn chain(recorded: &RecordedChain, layers: &[ServedLayer]) -> Result<Vec<Image>, String> {
    let mut chain: Vec<Image> = Vec::new();
    // From the bottom up: each is a child of the previous one.
    for (depth, layer) in layers.iter().enumerate().rev() {
        let parent = chain.last().map(|image| image.uuid);
        let image = match recorded.by_file.get(layer.file()) {
            Some(known) => Image { parent, size: if depth == 0 { layer.size } else { known.size }, ..known.clone() },
            None => unknown(recorded.sr, layer, parent)?,
        };
        if image.state == ImageState::Making {
            return Err(format!("a task is creating {}, which the disk already uses", image.file));
        }
        check_shown(recorded, &image, depth)?;
        chain.push(image);
    }
    chain.reverse();
    Ok(chain)
}

/// An image, recognized by its file name, that is missing from the catalogue.
fn unknown(sr: Uuid, layer: &ServedLayer, parent: Option<Uuid>) -> Result<Image, String> {
    let file = layer.file();
    let known =
        file.rsplit_once('.').and_then(|(stem, end)| Some((stem.parse().ok()?, end.parse::<ImageFormat>().ok()?)));
    let (uuid, format) =
        known.ok_or_else(|| format!("the disk uses {file}, which is not a known file of this repository"))?;
    Ok(Image { file: file.into(), ..Image::new(uuid, sr, format, layer.size, parent) })
}

/// Refuses a disk that writes to images of other VDIs, or is based on ones that others can write.
fn check_shown(recorded: &RecordedChain, image: &Image, depth: usize) -> Result<(), String> {
    match recorded.shown.get(&image.uuid) {
        Some((vdi, _)) if *vdi != recorded.vdi && depth == 0 => {
            Err(format!("the disk writes to {}, which also belongs to VDI {vdi}", image.file))
        }
        Some((vdi, true)) if *vdi != recorded.vdi => {
            Err(format!("the disk is backed by {}, which belongs to the writable VDI {vdi}", image.file))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod test {
    use repo::catalogue::file_name;

    use super::*;

    const VDI: Uuid = Uuid::from_u128(100);

    fn file(n: u128) -> String {
        file_name(Uuid::from_u128(n), ImageFormat::Qcow2)
    }

    /// Images of the catalogue, each based on the next; `shown` belong to other VDIs that are read-only, `written` to
    /// writable ones.
    fn recorded(chain: &[u128], others: &[u128], shown: &[u128], written: &[u128]) -> RecordedChain {
        let image = |n: u128, parent: Option<u128>| {
            let parent = parent.map(Uuid::from_u128);
            Image::new(Uuid::from_u128(n), Uuid::nil(), ImageFormat::Qcow2, 1 << 30, parent)
        };
        let images: Vec<Image> =
            chain.iter().enumerate().map(|(at, n)| image(*n, chain.get(at + 1).copied())).collect();
        let all = images.iter().cloned().chain(others.iter().map(|n| image(*n, None)));
        let by_file = all.map(|image| (image.file.clone(), image)).collect();
        let of = |n: &u128| Uuid::from_u128(1000 + n);
        let mut by_image: HashMap<Uuid, (Uuid, bool)> =
            shown.iter().map(|n| (Uuid::from_u128(*n), (of(n), false))).collect();
        by_image.extend(written.iter().map(|n| (Uuid::from_u128(*n), (of(n), true))));
        by_image.extend(images.first().map(|image| (image.uuid, (VDI, true))));
        RecordedChain { vdi: VDI, sr: Uuid::nil(), chain: images, by_file, shown: by_image }
    }

    fn layer(file: &str) -> ServedLayer {
        ServedLayer { path: format!("/srv/{file}").into(), size: 1 << 30, device: None, inode: None }
    }

    fn layers(files: &[u128]) -> Vec<ServedLayer> {
        files.iter().map(|n| layer(&file(*n))).collect()
    }

    /// Chain, kept and left images, as numbers.
    type Plain = (Vec<u128>, Vec<u128>, Vec<u128>);

    fn followed(recorded: &RecordedChain, disk: &[u128]) -> Plain {
        let Verdict::Follow(follow) = judge(recorded, &layers(disk)) else {
            panic!("{:?}", judge(recorded, &layers(disk)))
        };
        for (image, below) in follow.chain.iter().zip(follow.chain.iter().skip(1).map(Some).chain([None])) {
            assert_eq!(image.parent, below.map(|below| below.uuid));
        }
        let plain = |images: &[Image]| images.iter().map(|image| image.uuid.as_u128()).collect();
        (plain(&follow.chain), follow.kept.iter().map(Uuid::as_u128).collect(), plain(&follow.left))
    }

    fn diverged(recorded: &RecordedChain, disk: &[u128]) {
        assert!(matches!(judge(recorded, &layers(disk)), Verdict::Diverged(_)), "{:?}", judge(recorded, &layers(disk)));
    }

    #[test]
    fn equal_chains_match_and_a_larger_disk_updates_the_catalogue() {
        let recorded = recorded(&[3, 2], &[], &[2], &[]);
        assert_eq!(judge(&recorded, &layers(&[3, 2])), Verdict::Agree);
        let mut grown = layers(&[3, 2]);
        grown[0].size = 2 << 30;
        let Verdict::Follow(follow) = judge(&recorded, &grown) else { panic!() };
        assert_eq!(
            (follow.chain[0].size, follow.chain[1].size, follow.kept, follow.left),
            (2 << 30, 1 << 30, vec![], vec![])
        );
    }

    #[test]
    fn a_merged_leaf_is_removed_from_the_chain() {
        assert_eq!(followed(&recorded(&[3, 2, 1], &[], &[1], &[]), &[2, 1]), (vec![2, 1], vec![], vec![3]));
    }

    #[test]
    fn images_merged_in_the_middle_are_removed_from_the_chain() {
        assert_eq!(followed(&recorded(&[3, 2, 1], &[], &[], &[]), &[3, 1]), (vec![3, 1], vec![], vec![2]));
    }

    #[test]
    fn snapshots_unknown_to_an_older_catalogue_are_kept() {
        // 4 and 5 were created after the backup: 3 and 4 were snapshots, 5 is the leaf.
        assert_eq!(followed(&recorded(&[3, 2], &[], &[2], &[]), &[5, 4, 3, 2]), (vec![5, 4, 3, 2], vec![4, 3], vec![]));
    }

    #[test]
    fn images_of_other_vdis_need_a_decision() {
        diverged(&recorded(&[3, 2], &[], &[2], &[]), &[2]);
        diverged(&recorded(&[3], &[7], &[], &[7]), &[4, 7, 3]);
        diverged(&recorded(&[3], &[7], &[7], &[]), &[7, 3]);
        diverged(&recorded(&[3, 2, 1], &[], &[2], &[]), &[3, 1]);
        diverged(&recorded(&[3], &[7], &[], &[]), &[7]);
    }

    #[test]
    fn a_foreign_file_is_not_adopted() {
        let mut layers = layers(&[3, 2]);
        layers.insert(0, layer("web.qcow2"));
        assert!(matches!(judge(&recorded(&[3, 2], &[], &[], &[]), &layers), Verdict::Diverged(_)));
    }
}
