//! Uses an image, and judges what it shows.

use std::fs;

use super::failure::{Failure, FailureClass};
use super::life::Served;
use super::oracle::Mismatch;
use super::round::Round;

impl Round<'_> {
    /// Checks bytes that were read by this use.
    pub fn judge(&mut self, by: &str, bytes: &[u8]) -> Result<(), Failure> {
        let wanted = usize::try_from(self.state.image.units * crate::content::UNIT).unwrap_or(usize::MAX);
        if bytes.len() < wanted && !self.state.cut {
            let what = format!("{by}: the disk has {} bytes, and had {wanted}", bytes.len());
            return Err(Failure::new(FailureClass::Foreign, what));
        }
        self.log(by);
        let used = bytes.get(..wanted).unwrap_or(bytes);
        self.state.oracle.check_read(used).map_err(|wrong| match wrong {
            Mismatch::Lost(why) => Failure::new(FailureClass::Lost, format!("{by}: {why}")),
            Mismatch::Foreign(why) => Failure::new(FailureClass::Foreign, format!("{by}: {why}")),
        })
    }

    /// Uses the image without changing it.
    pub fn use_at_rest(&mut self) -> Result<(), Failure> {
        match self.random.below(4) {
            0 => self.serve_read_only(),
            1 => self.convert(false),
            2 => self.convert(true),
            _ => self.check(),
        }
    }

    fn serve_read_only(&mut self) -> Result<(), Failure> {
        for _ in 0..2 {
            match Served::start(&self.ground.programs, &self.site, &self.state.image, true)? {
                Ok(mut served) => {
                    match served.read(self.state.image.units) {
                        Ok(bytes) => self.judge("serve --read-only", &bytes)?,
                        Err(_) if self.state.cut => {}
                        Err(error) => {
                            return Err(Failure::new(FailureClass::Refused, format!("a read, read-only: {error}")));
                        }
                    }
                    return served.stop().map_err(Failure::of_program);
                }
                Err(_) if self.state.cut => return Ok(()),
                Err(said) => self.follow_advice(&said, "serve --read-only")?,
            }
        }
        Err(self.refused("serve --read-only", "the advice has changed nothing"))
    }

    fn convert(&mut self, compared: bool) -> Result<(), Failure> {
        let out = self.site.room.join("out");
        let (name, target, parents) =
            (self.state.image.name(), format!("raw:{}", out.display()), self.state.image.parent_words());
        if !self.attempt(
            "convert",
            &[&["image", "convert", &name, &target], words(&parents).as_slice()].concat(),
            &[0],
        )? {
            return Ok(());
        }
        let bytes = fs::read(&out).map_err(|error| format!("{}: {error}", out.display()))?;
        self.judge("convert", &bytes)?;
        if compared {
            let line = [&["image", "compare", &name, &target], words(&parents).as_slice()].concat();
            self.attempt("compare", &line, &[0])?;
        }
        fs::remove_file(&out).map_err(|error| Failure::of_program(format!("{}: {error}", out.display())))
    }

    fn check(&mut self) -> Result<(), Failure> {
        let (name, parents) = (self.state.image.name(), self.state.image.parent_words());
        let line = [&["image", "check", &name], words(&parents).as_slice()].concat();
        self.attempt("check", &line, &[0, 5]).map(drop)
    }

    /// Runs a job, which must exit with one of these codes; repeated if the image is held and the advice was followed.
    /// Returns false if the job failed as it should.
    pub fn attempt(&mut self, by: &str, line: &[&str], codes: &[i32]) -> Result<bool, Failure> {
        for _ in 0..2 {
            let said = self.ground.programs.run(&self.site, line)?;
            if said.code.is_some_and(|code| codes.contains(&code)) {
                self.log(&format!("{by}: ok"));
                return Ok(true);
            }
            if self.state.cut {
                return Ok(false);
            }
            self.follow_advice(&format!("{} (exit code {:?})", said.text.trim_end(), said.code), by)?;
        }
        Err(self.refused(by, "the advice has changed nothing"))
    }

    /// Follows the advice of a refusal, if the image may be refused.
    pub fn follow_advice(&mut self, said: &str, by: &str) -> Result<(), Failure> {
        let redo = self.site.room.join("redo");
        let advised = said.split_whitespace().find(|word| word.starts_with(&*redo.to_string_lossy()));
        let (Some(_), Some(path)) = (self.state.hold, advised) else {
            return Err(self.refused(by, said));
        };
        self.log(&format!("{by}: held, its advice is followed"));
        fs::remove_file(path).map_err(|error| Failure::of_program(format!("the advice: {path}: {error}")))?;
        self.state.oracle.lose();
        self.state.has_pending_log = false;
        Ok(())
    }

    /// The failure that a sound image was refused.
    pub fn refused(&self, by: &str, why: &str) -> Failure {
        Failure::new(FailureClass::Refused, format!("{by}: {}", why.trim_end()))
    }

    /// Serves a truncated image: it must fail or show the expected content.
    pub fn serve_cut(&mut self) -> Result<(), Failure> {
        let Ok(mut served) = Served::start(&self.ground.programs, &self.site, &self.state.image, false)? else {
            self.log("refused, rightly");
            return Ok(());
        };
        let units = self.state.image.units.min(served.client.size / crate::content::UNIT);
        for unit in 0..units {
            let Ok(bytes) = served.client.read(unit * crate::content::UNIT, 4096) else { continue };
            let mut live = self.state.oracle.live.clone();
            if let Err(why) = live.check_read(unit, &bytes) {
                return Err(Failure::new(FailureClass::Foreign, format!("serve, cut off: {why}")));
            }
        }
        Ok(())
    }
}

/// Converts a list of words into arguments.
fn words(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}
