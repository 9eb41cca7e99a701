//! Replaces a damaged or missing catalogue while no daemon runs, with a backup or an empty one.

use std::path::Path;

use api::{Code, Problem};
use repo::Catalogue;
use repo::catalogue::backup;

use crate::config::Config;
use crate::daemon;

/// The word that selects the newest intact backup.
const LATEST: &str = "latest";

/// Replaces the catalogue with a backup; returns a message for the user. Refused while a daemon runs.
pub fn restore(config: &Config, from: &str) -> Result<String, Problem> {
    let _locks = daemon::alone(config)?;
    let path = config.catalogue();
    let mut said = String::new();
    let (from, new) = match from {
        LATEST => newest_sound(config, &mut said)?,
        file => (file.to_owned(), backup::prepare(Path::new(file), &path)?),
    };
    let aside = backup::replace(&new, &path, "restore")?;
    said += &format!("{} has been restored from {from}\n", path.display());
    if let Some(aside) = aside {
        said += &format!("the old file was kept as {}\n", aside.display());
    }
    said += "start taplined: it reads later changes from the repositories; tokens revoked since the backup are valid \
        again: check 'tapline token list'\n";
    Ok(said)
}

fn newest_sound(config: &Config, said: &mut String) -> Result<(String, std::path::PathBuf), Problem> {
    for found in backup::list(&config.backups())? {
        match backup::prepare(Path::new(&found.file), &config.catalogue()) {
            Ok(new) => return Ok((found.file, new)),
            Err(problem) => *said += &format!("skipping {}: {problem}\n", found.file),
        }
    }
    let what = format!("{said}there is no intact backup in {}", config.backups().display());
    Err(Problem::new(Code::NotFound, what).advise("give a copy from elsewhere, or see --rebuild"))
}

/// Creates an empty catalogue, as explicitly requested; returns a message for the user.
pub fn init(config: &Config) -> Result<String, Problem> {
    let _locks = daemon::alone(config)?;
    must_have_none(config)?;
    let new = backup::clear_new(&config.catalogue())?;
    let catalogue = Catalogue::open(&new)?;
    finish(config, catalogue, "init")
}

/// Refuses to replace a usable catalogue.
pub fn must_have_none(config: &Config) -> Result<(), Problem> {
    let path = config.catalogue();
    if backup::is_nothing(&path) {
        return Ok(());
    }
    match Catalogue::open(&path) {
        Err(problem) if problem.code == Code::Damaged => return Ok(()),
        Err(problem) if problem.code == Code::Unsupported => return Err(problem),
        _ => {}
    }
    let what = format!("there is already a usable catalogue at {}", path.display());
    let advice = "start taplined with it, and add repositories with 'tapline sr introduce'. To replace it anyway, move \
        it away first";
    Err(Problem::new(Code::Exists, what).advise(advice))
}

/// Replaces the current catalogue with the one created next to it.
pub fn finish(config: &Config, catalogue: Catalogue, why: &str) -> Result<String, Problem> {
    let path = config.catalogue();
    let made = backup::finish(catalogue, &path)?;
    let aside = backup::replace(&made, &path, why)?;
    let mut said = format!("{} has been rebuilt\n", path.display());
    if let Some(aside) = aside {
        said += &format!("the old file was kept as {}\n", aside.display());
    }
    Ok(said)
}
