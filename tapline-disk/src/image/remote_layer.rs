//! A layer at an NBD server: next to it there is no redo log, and no marker of a command.

use control::ImageName;

use crate::image::chain::{self, Layers};
use crate::image::remote::{self, User};
use crate::process::failure::Failure;

impl Layers {
    /// Adds an image at a server.
    pub fn add_remote(&mut self, name: &ImageName, write: bool, served: bool) -> Result<(), Failure> {
        let user = if served { User::Served } else { User::Job };
        let Some(mut file) = remote::open(&self.from, name, write, user)? else { return Ok(()) };
        self.images.push(chain::open_as_it_is(&self.from, name, &mut file, write)?);
        self.names.push(name.clone());
        self.files.push(file);
        Ok(())
    }
}
