//! The images of the rows: made and filled when they are first asked for.

use std::cell::RefCell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Image, Options, Storage, Who};
use crate::server::{Engine, Kind};
use crate::{chain, fill, scatter, tapline};

/// The images of a kind of storage; they go away with it.
pub(super) struct Room {
    place: tempfile::TempDir,
    engine: Engine,
    mib: u64,
    /// The layers of the chain, once it is made.
    scattered: RefCell<Vec<String>>,
}

impl Room {
    pub(super) fn new(storage: Storage, options: &Options) -> Result<Room, String> {
        let (parent, engine) = match storage {
            Storage::Memory => (&options.memory, Engine::Aio),
            Storage::Disk => (&options.disk, Engine::Uring),
        };
        let place = tempfile::Builder::new().prefix("tapline-targets-").tempdir_in(parent);
        let place = place.map_err(|error| format!("a directory in {}: {error}", parent.display()))?;
        Ok(Room { place, engine, mib: options.mib, scattered: RefCell::default() })
    }

    /// Where the images and sockets are.
    pub(super) fn place(&self) -> &Path {
        self.place.path()
    }

    /// What fio's engine that is the same as ours is called.
    pub(super) fn fio_engine(&self) -> &'static str {
        match self.engine {
            Engine::Aio => "--ioengine=libaio",
            Engine::Uring => "--ioengine=io_uring",
        }
    }

    /// MiB of each image.
    pub(super) fn mib(&self) -> u64 {
        self.mib
    }

    /// An image of ours.
    pub(super) fn ours(&self, image: Image) -> Result<PathBuf, String> {
        self.made(image, "tapline")
    }

    /// Who serves it, and what. `None`: no server.
    pub(super) fn kind(&self, name: &'static str, who: Who) -> Result<Option<Kind>, String> {
        let tapline = |image| {
            let images = match image {
                Image::Null => vec![format!("null:{}M", self.mib)],
                Image::ScatteredChain => self.scattered()?,
                _ => vec![named(image, &self.ours(image)?)],
            };
            Ok::<Kind, String>(Kind::tapline(name, images).on(self.engine))
        };
        let theirs = |image| self.made(image, "peer");
        Ok(Some(match who {
            Who::Fio => return Ok(None),
            Who::Tapline(image) => tapline(image)?,
            Who::TaplineWith(image, more) => tapline(image)?.with(more),
            Who::TaplineNbd => tapline(Image::Raw)?.over_nbd(),
            Who::Qsd(Image::Null) => Kind::qemu(name, "null-co", Path::new(&(self.mib << 20).to_string())),
            Who::Qsd(image) => {
                let format = match image {
                    Image::Vhd | Image::QemuVhd => "vpc",
                    Image::Qcow2 => "qcow2",
                    Image::Raw | Image::Sparse | Image::Null => "raw",
                    Image::ScatteredChain => return Err("the peers have no chains of VHDs".to_owned()),
                };
                Kind::qemu(name, format, &theirs(image)?).on(self.engine)
            }
            Who::Nbdkit => Kind::nbdkit(name, &theirs(Image::Raw)?),
            Who::QemuNbd => Kind::qemu_nbd(name, &theirs(Image::Raw)?),
        }))
    }

    /// The layers of a chain, leaf first. They are made once.
    fn scattered(&self) -> Result<Vec<String>, String> {
        let mut made = self.scattered.borrow_mut();
        if made.is_empty() {
            let size = format!("{}M", self.mib);
            *made = chain(self.place(), "vhd", ("scattered", &size), &|kind, layer| match layer {
                0 => fill(std::slice::from_ref(kind), self.place()),
                _ => scatter(kind, self.place(), layer),
            })?;
        }
        Ok(made.clone())
    }

    /// Makes the image anew that nothing was written to.
    pub(super) fn renew(&self) -> Result<(), String> {
        for owner in ["tapline", "peer"] {
            let path = self.path(Image::Sparse, owner);
            let made = File::create(&path).and_then(|file| file.set_len(self.mib << 20));
            made.map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    fn path(&self, image: Image, owner: &str) -> PathBuf {
        self.place().join(format!("{owner}.{image:?}").to_lowercase())
    }

    fn made(&self, image: Image, owner: &str) -> Result<PathBuf, String> {
        let path = self.path(image, owner);
        if path.exists() {
            return Ok(path);
        }
        if image == Image::Sparse {
            return self.renew().map(|()| path);
        }
        let size = format!("{}M", self.mib);
        if image == Image::QemuVhd {
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", "vpc", "-o", "subformat=dynamic,force_size=on"]).arg(&path).arg(size);
            let made = command.status().map_err(|error| format!("qemu-img: {error}"))?;
            if !made.success() {
                return Err(format!("{command:?}: {made}"));
            }
        } else {
            tapline(&["image", "create", &named(image, &path), "--size", &size])?;
        }
        fill(&[Kind::tapline("tapline", vec![named(image, &path)])], self.place())?;
        Ok(path)
    }
}

/// An image as the command line names it.
fn named(image: Image, path: &Path) -> String {
    let format = match image {
        Image::Vhd | Image::QemuVhd | Image::ScatteredChain => "vhd",
        Image::Qcow2 => "qcow2",
        Image::Raw | Image::Sparse | Image::Null => "raw",
    };
    format!("{format}:{}", path.display())
}
