//! Where another program of this installation is.

use std::io;
use std::path::{Path, PathBuf};

/// Path of an installed program: in this program's directory, otherwise the first in the PATH.
pub fn program(name: &str) -> io::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let me = std::env::current_exe().ok();
    let own = me.as_deref().and_then(Path::parent).map(Path::to_owned);
    let found = own.into_iter().chain(std::env::split_paths(&path)).map(|directory| directory.join(name));
    let found = found.into_iter().find(|path| path.is_file());
    found.map_or_else(|| Err(io::ErrorKind::NotFound.into()), std::path::absolute)
}
