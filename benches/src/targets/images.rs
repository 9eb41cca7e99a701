//! The images of the rows, created when they are first needed.

use std::cell::RefCell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Image, Options, RowServer, Storage};
use crate::server::{Engine, ServerKind};
use crate::{chain, fill, scatter, tapline};

/// The images on a storage, in a temporary directory.
pub(super) struct Room {
    place: tempfile::TempDir,
    engine: Engine,
    mib: u64,
    /// The layers of the scattered chain, once created.
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

    /// The directory of images and sockets.
    pub(super) fn place(&self) -> &Path {
        self.place.path()
    }

    /// The name of the corresponding engine in fio.
    pub(super) fn fio_engine(&self) -> &'static str {
        match self.engine {
            Engine::Aio => "--ioengine=libaio",
            Engine::Uring => "--ioengine=io_uring",
        }
    }

    /// Size of each image in MiB.
    pub(super) fn mib(&self) -> u64 {
        self.mib
    }

    /// The path of an image created by Tapline.
    pub(super) fn ours(&self, image: Image) -> Result<PathBuf, String> {
        self.made(image, "tapline")
    }

    /// The server and its image; `None`: no server.
    pub(super) fn kind(&self, name: &'static str, who: RowServer) -> Result<Option<ServerKind>, String> {
        let tapline = |image| {
            let images = match image {
                Image::Null => vec![format!("null:{}M", self.mib)],
                Image::ScatteredChain => self.scattered()?,
                _ => vec![named(image, &self.ours(image)?)],
            };
            Ok::<ServerKind, String>(ServerKind::tapline(name, images).on(self.engine))
        };
        let theirs = |image| self.made(image, "peer");
        Ok(Some(match who {
            RowServer::Fio => return Ok(None),
            RowServer::Tapline(image) => tapline(image)?,
            RowServer::TaplineWith(image, more) => tapline(image)?.with(more),
            RowServer::TaplineNbd => tapline(Image::Raw)?.over_nbd(),
            RowServer::Qsd(Image::Null) => ServerKind::qemu(name, "null-co", Path::new(&(self.mib << 20).to_string())),
            RowServer::Qsd(image) => {
                let format = match image {
                    Image::Vhd | Image::QemuVhd => "vpc",
                    Image::Qcow2 => "qcow2",
                    Image::Raw | Image::Sparse | Image::Null => "raw",
                    Image::ScatteredChain => return Err("the peers have no chains of VHDs".to_owned()),
                };
                ServerKind::qemu(name, format, &theirs(image)?).on(self.engine)
            }
            RowServer::Nbdkit => ServerKind::nbdkit(name, &theirs(Image::Raw)?),
            RowServer::QemuNbd => ServerKind::qemu_nbd(name, &theirs(Image::Raw)?),
        }))
    }

    /// The layers of the scattered chain, leaf first, created once.
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

    /// Creates the empty image again.
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
        fill(&[ServerKind::tapline("tapline", vec![named(image, &path)])], self.place())?;
        Ok(path)
    }
}

/// The name of an image on the command line.
fn named(image: Image, path: &Path) -> String {
    let format = match image {
        Image::Vhd | Image::QemuVhd | Image::ScatteredChain => "vhd",
        Image::Qcow2 => "qcow2",
        Image::Raw | Image::Sparse | Image::Null => "raw",
    };
    format!("{format}:{}", path.display())
}
