//! Sound images with which rounds begin.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use super::image::{Image, ImageKind, Layer, Stored};
use super::life::{self, Served, UNITS};
use super::oracle::Oracle;
use super::program::Programs;
use super::site::{DEVICE_LEN, Medium, Site, run};
use crate::content::UNIT;

/// Sound images, each created when it is first needed.
#[derive(Debug)]
pub struct Library {
    directory: PathBuf,
    numbers: (u32, u32),
    made: Mutex<BTreeMap<(ImageKind, bool, u64), Arc<Stored>>>,
}

impl Library {
    /// An empty library.
    pub fn new(directory: PathBuf, numbers: (u32, u32)) -> Library {
        Library { directory, numbers, made: Mutex::default() }
    }

    /// An image for such a medium; there are several variants of each kind.
    pub fn image(
        &self,
        programs: &Programs,
        kind: ImageKind,
        medium: Medium,
        variant: u64,
    ) -> Result<Arc<Stored>, String> {
        let is_device = medium == Medium::Loop;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stored) = made.get(&(kind, is_device, variant)) {
            return Ok(Arc::clone(stored));
        }
        let stored = Arc::new(self.make(programs, kind, is_device, variant)?);
        made.insert((kind, is_device, variant), Arc::clone(&stored));
        Ok(stored)
    }

    fn make(&self, programs: &Programs, kind: ImageKind, is_device: bool, variant: u64) -> Result<Stored, String> {
        let word = format!("{kind:?}-{}-{variant}", if is_device { "device" } else { "file" }).to_lowercase();
        let room = self.directory.join(&word);
        let medium = if is_device { Medium::Loop } else { Medium::Tmpfs };
        let mut site = Site::make(medium, room.clone(), room.join("room"), self.numbers)?;
        let mut oracle = Oracle::default();
        // Each image has its own stamps, so that foreign data is recognized.
        let number = 1 + variant + 10 * u64::from(is_device) + 100 * u64::try_from(word.len()).unwrap_or(0);
        let seed = word.bytes().fold(number, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let mut stamps = (seed % 100_000) << 12;
        let mut parents = Vec::new();
        if let Some(format) = kind.parent() {
            let base = room.join(format!("base-{word}"));
            let image =
                Image { format, leaf: base.clone(), data: None, parents: Vec::new(), units: UNITS, is_fixed: false };
            programs.done(&site, &["image", "create", &image.name(), "--size", &(UNITS * UNIT).to_string()])?;
            fill(programs, &site, &image, &mut oracle, seed ^ 1, &mut stamps)?;
            parents.push(Layer { format, leaf: base, data: None });
        }
        if is_device {
            let empty = room.join("empty");
            fs::File::create(&empty).and_then(|file| file.set_len(DEVICE_LEN)).map_err(|error| error.to_string())?;
            site.attach_copy(&empty)?;
        }
        let leaf = site.first_path();
        let data = (kind == ImageKind::DataFile).then(|| room.join("leaf.data"));
        let (format, is_fixed) = (kind.format(), kind == ImageKind::FixedVhd);
        let image = Image { format, leaf: leaf.clone(), data, parents, units: UNITS, is_fixed };
        create(programs, &site, kind, &image)?;
        fill(programs, &site, &image, &mut oracle, seed, &mut stamps)?;
        let kept = match is_device {
            false => leaf,
            true => {
                let kept = room.join("kept");
                super::site::copy(&leaf, &kept)?;
                kept
            }
        };
        let Image { format, data, parents, units, is_fixed, .. } = image;
        Ok(Stored { format, leaf: kept, data, parents, content: oracle.live, units, is_fixed })
    }
}

/// Creates an empty image.
fn create(programs: &Programs, site: &Site, kind: ImageKind, image: &Image) -> Result<(), String> {
    let size = (UNITS * UNIT).to_string();
    let by_qemu = |format: &str, options: &str| {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format, "-o", options]).arg(&image.leaf).arg(&size);
        run(command.current_dir(&site.files))
    };
    let name = image.name();
    let mut words = vec!["image", "create", &name];
    let parents = image.parent_words();
    match kind {
        ImageKind::Raw if site.devices.is_some() => return Ok(()),
        ImageKind::VhdByQemu | ImageKind::Qcow2ByQemu => {
            let (format, options) = kind.qemu_options().ok_or("QEMU does not make it")?;
            return by_qemu(format, options);
        }
        ImageKind::DataFile => return by_qemu("qcow2", "data_file=leaf.data"),
        ImageKind::FixedVhd => words.extend(["--size", &size, "--fixed"]),
        ImageKind::Vhd => words.extend(["--size", &size, "--block-size", "512K"]),
        _ if image.parents.is_empty() => words.extend(["--size", &size]),
        _ => words.extend(parents.iter().map(String::as_str)),
    }
    programs.done(site, &words)
}

/// Fills an image at random, and leaves it as a stopped process does.
fn fill(
    programs: &Programs,
    site: &Site,
    image: &Image,
    oracle: &mut Oracle,
    seed: u64,
    stamps: &mut u64,
) -> Result<(), String> {
    let mut random = sim::random::Random::new(seed);
    let mut served = Served::start(programs, site, image, false)?.map_err(|said| format!("a new image: {said}"))?;
    for _ in 0..12 {
        life::write(&mut served.client, oracle, &mut random, stamps)?;
    }
    // Reading settles what discards have left.
    let bytes = served.read(image.units).map_err(|error| format!("a new image: {error}"))?;
    oracle.check_read(&bytes).map_err(|wrong| format!("a new image: {wrong:?}"))?;
    served.stop()?;
    oracle.flushed();
    Ok(())
}
