//! The catalogue looks after itself: it is not believed when it is damaged (decision 0022).

use api::{Code, Problem};
use repo::Catalogue;

use crate::config::Config;

/// Opens the catalogue, or makes the first one.
pub fn open(config: &Config) -> Result<Catalogue, Problem> {
    Catalogue::open(&config.catalogue()).map_err(|problem| match problem.code {
        Code::Damaged => refused(config, problem),
        _ => problem,
    })
}

/// A damaged catalogue, with what can be done about it.
fn refused(config: &Config, problem: Problem) -> Problem {
    let what = format!("{} ({})", problem.message, config.catalogue().display());
    Problem::new(Code::Damaged, what).advise("put a copy of it back")
}
