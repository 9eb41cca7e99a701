//! The words for a disk: the URI of an NBD export, or an image as FORMAT:PATH.

use control::ImageName;
use nbd::uri::{BadUri, Uri};

use crate::failure::{Exit, Failure};

/// A disk to be read or written.
pub enum Place {
    /// An export of an NBD server.
    Export(Uri),
    /// An image file.
    Image(ImageName),
}

impl Place {
    /// Parses a word of the command line.
    pub fn parse(word: &str) -> Result<Place, Failure> {
        let bad = |why: String| Failure::new(Exit::Usage, why);
        let name: ImageName = word.parse().map_err(|error: control::NotAnImage| bad(error.to_string()))?;
        match name.uri().map(str::parse) {
            None => Ok(Place::Image(name)),
            Some(Ok(uri)) => Ok(Place::Export(uri)),
            Some(Err(error)) => {
                let error: BadUri = error;
                // The URI has the token.
                let shown = if error == BadUri::Token { "this".to_owned() } else { format!("'{word}'") };
                Err(bad(format!("{shown} is not a usable NBD URI: {error}")))
            }
        }
    }
}
