//! Records the result of a scan in the catalogue, in one commit; objects that tasks have changed since the scan stay
//! as they are.
//!
//! Invariant: added images are never merged or removed automatically. They have a VDI, which only a user can destroy;
//! or, if marked hidden by their creator, they are kept.

use std::collections::{HashMap, HashSet};

use api::{Code, Placed, Problem, Scan, Sr};
use repo::Tx;
use repo::catalogue::{Among, Image, ImageState, NewVdi};
use uuid::Uuid;

use super::placement::{Placement, Placing};

/// Maximum length of a VDI's name ([`api::Name`]).
const NAME_MAX: usize = 128;

/// Records the result: physical sizes of images, missing images, and new images.
pub fn record(
    tx: &mut Tx<'_>,
    sr: &Sr,
    present: Vec<(Image, u64)>,
    gone: Vec<Image>,
    placement: Placement,
) -> Result<Scan, Problem> {
    tx.attached_sr(sr.uuid)?;
    let mut scan = Scan { unplaced: placement.unplaced, ..Scan::default() };
    for (image, physical) in present {
        if set_present(tx, &image, physical)? {
            scan.returned.extend(tx.vdi_of_image(image.uuid)?);
        }
    }
    for image in gone {
        if set_missing(tx, &image)? {
            scan.missing.extend(tx.vdi_of_image(image.uuid)?);
        }
    }
    let images = tx.images_of_sr(sr.uuid)?.into_iter().filter(|image| image.state != ImageState::NoData);
    let mut known: HashMap<String, Uuid> = images.map(|image| (image.file, image.uuid)).collect();
    let mut added = Vec::new();
    for placing in placement.placed {
        let file = placing.found.file.file.clone();
        let parent = match parent(tx, &placing, &known) {
            Ok(parent) => parent,
            Err(problem) => {
                scan.unplaced.push(super::listing::unplaced(file, problem));
                continue;
            }
        };
        // A task has created it in the meantime.
        if known.contains_key(&file) {
            continue;
        }
        let image = add_image(tx, sr, &placing, parent)?;
        known.insert(file, image);
        added.push((placing, image));
    }
    scan.appeared = add_vdis(tx, sr, added)?;
    Ok(scan)
}

/// The image that becomes the parent of an image; refused if it may be written.
fn parent(tx: &Tx<'_>, placing: &Placing, known: &HashMap<String, Uuid>) -> Result<Option<Uuid>, Problem> {
    let Some(file) = &placing.parent else { return Ok(None) };
    let Some(image) = known.get(file) else {
        let what = format!("its parent '{file}' is unplaced or was just removed");
        return Err(Problem::new(Code::NotFound, what).advise("scan again"));
    };
    let vdi = tx.vdi_of_image(*image)?.map(|vdi| tx.vdi(vdi)).transpose()?;
    match vdi.filter(|vdi| !vdi.read_only) {
        None => Ok(Some(*image)),
        Some(vdi) => {
            let what = format!("its parent '{file}' belongs to the writable VDI {}", vdi.uuid);
            Err(Problem::new(Code::InUse, what).advise("make that VDI read-only if it has not been written since"))
        }
    }
}

/// Records that an image is present; returns whether it was missing.
fn set_present(tx: &mut Tx<'_>, image: &Image, physical: u64) -> Result<bool, Problem> {
    let Some(now) = tx.find_image(image.uuid)? else { return Ok(false) };
    let returned = now.state == ImageState::Missing;
    let state = if returned { ImageState::Ready } else { now.state };
    if returned || now.physical != physical {
        tx.set_image(&Image { state, physical, ..now })?;
    }
    Ok(returned)
}

/// Records that an image is missing; returns whether it was present.
fn set_missing(tx: &mut Tx<'_>, image: &Image) -> Result<bool, Problem> {
    match tx.find_image(image.uuid)? {
        Some(now) if now.file == image.file && matches!(now.state, ImageState::Ready | ImageState::Damaged) => {
            tx.set_image(&Image { state: ImageState::Missing, physical: 0, ..now }).map(|()| true)
        }
        _ => Ok(false),
    }
}

/// Adds an image to the catalogue.
fn add_image(tx: &mut Tx<'_>, sr: &Sr, placing: &Placing, parent: Option<Uuid>) -> Result<Uuid, Problem> {
    let found = &placing.found;
    let image = Image {
        uuid: Uuid::new_v4(),
        sr: sr.uuid,
        file: found.file.file.clone(),
        format: found.file.format,
        size: found.size,
        physical: found.file.physical,
        parent,
        state: ImageState::Ready,
        kept: found.hidden,
    };
    tx.add_image(&image).map(|()| image.uuid)
}

/// Creates VDIs for added images: read-only ones for images that have children, because writing to them would change
/// those; none for images that XenServer's storage manager has marked hidden.
fn add_vdis(tx: &mut Tx<'_>, sr: &Sr, added: Vec<(Placing, Uuid)>) -> Result<Vec<Placed>, Problem> {
    let is_base = |placing: &Placing| placing.below_others && !placing.found.hidden;
    let bases: HashSet<Uuid> = added.iter().filter(|(placing, _)| is_base(placing)).map(|(_, image)| *image).collect();
    let mut appeared = Vec::new();
    // Parents come before their children; the VDI above a base is known once that VDI has been added.
    for (placing, image) in added.into_iter().rev() {
        let vdi = match placing.found.hidden {
            true => None,
            false => Some(add_vdi(tx, sr, &placing, image, &bases)?),
        };
        appeared.push(Placed { file: placing.found.file.file, vdi });
    }
    appeared.reverse();
    Ok(appeared)
}

fn add_vdi(tx: &mut Tx<'_>, sr: &Sr, placing: &Placing, image: Uuid, bases: &HashSet<Uuid>) -> Result<Uuid, Problem> {
    let file = &placing.found.file.file;
    let fixed = sr.is_read_only();
    let base = bases.contains(&image);
    let vdi = NewVdi {
        uuid: identity(tx, file)?,
        image,
        name: free_name(tx, sr, file)?,
        description: api::Description::default(),
        labels: api::Labels::default(),
        read_only: base || is_read_only(fixed, file),
        snapshot: if base { only_above(tx, image, bases)?.map(|of| (of, None)) } else { None },
        scheduled: false,
        for_backup: false,
        // The file does not record it, but another disk of its chain may have one.
        logical_block_size: Some(tx.block_size_of_relatives(image)?.unwrap_or_default()),
    };
    tx.add_vdi(&vdi).map(|()| vdi.uuid)
}

/// Whether the VDI of a file is read-only, whatever is based on it. `fixed`: the repository is read-only.
pub fn is_read_only(fixed: bool, file: &str) -> bool {
    fixed || file.ends_with(".iso")
}

/// The only VDI above a base, if there is exactly one: the base is an earlier state of it. Other bases do not count.
fn only_above(tx: &Tx<'_>, image: Uuid, bases: &HashSet<Uuid>) -> Result<Option<Uuid>, Problem> {
    let mut above = Vec::new();
    for vdi in tx.vdis_above(image)? {
        if !bases.contains(&tx.vdi_image(vdi)?) {
            above.push(vdi);
        }
    }
    Ok(above.first().copied().filter(|_| above.len() == 1))
}

/// The UUID for the VDI of a file: that in its name, as with XenServer, unless it is taken.
fn identity(tx: &Tx<'_>, file: &str) -> Result<Uuid, Problem> {
    let stem = file.rsplit_once('.').map_or(file, |(stem, _)| stem);
    match Uuid::parse_str(stem) {
        Ok(uuid) if tx.find_vdi(uuid)?.is_none() => Ok(uuid),
        _ => Ok(Uuid::new_v4()),
    }
}

/// A free name for the VDI of a file. The stem may be taken, such as `web` for `web.vhd`; then the whole file name is
/// tried, which differs between files.
fn free_name(tx: &Tx<'_>, sr: &Sr, file: &str) -> Result<api::Name, Problem> {
    let (among, first) = (Among::Vdis(sr.uuid), name(file)?);
    if tx.is_name_free(among, &first)? {
        return Ok(first);
    }
    tx.free_name(among, &api::Name::try_from(file.to_owned()).unwrap_or(first), "")
}

/// The name of the file without its suffix, if that is a valid name.
fn name(file: &str) -> Result<api::Name, Problem> {
    let stem = file.rsplit_once('.').map_or(file, |(stem, _)| stem);
    let short = |text: &str| api::visible(text).chars().take(NAME_MAX).collect::<String>().trim().to_owned();
    let tried = [short(stem), short(file), "image".into()];
    let found = tried.into_iter().find_map(|text| api::Name::try_from(text).ok());
    found.ok_or_else(|| Problem::failed(format_args!("choose a name for the VDI of {file}"), "it has no usable part"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_vdi_is_named_after_its_file_where_possible() {
        assert_eq!(name("web root.vhd").unwrap().as_str(), "web root");
        let uuid = "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d.vhd";
        assert_eq!(name(uuid).unwrap().as_str(), uuid);
        assert_eq!(name(&format!("{}.raw", "x".repeat(200))).unwrap().as_str(), "x".repeat(128));
        assert_eq!(name(" .raw").unwrap().as_str(), ".raw");
        assert_eq!(name("web\u{202e}war.raw").unwrap().as_str(), "web\\u{202e}war");
    }
}
