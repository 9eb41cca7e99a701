//! The libraries of the dashboard, unchanged from npm, with their licences: uPlot 1.6.32 (MIT) draws plots, and the
//! core of noVNC 1.7.0 (MPL 2.0, with pako, MIT) shows the screens of VMs.

use super::{CSS, File, JS, TEXT};

macro_rules! web {
    ($name:literal) => {
        include_str!(concat!("../../../../web/", $name))
    };
}

/// The files by path.
#[rustfmt::skip]
pub const FILES: &[File] = &[
    ("/web/novnc/LICENSE.MPL-2.0", TEXT, web!("novnc/LICENSE.MPL-2.0")),
    ("/web/novnc/LICENSE.txt", TEXT, web!("novnc/LICENSE.txt")),
    ("/web/novnc/core/base64.js", JS, web!("novnc/core/base64.js")),
    ("/web/novnc/core/crypto/aes.js", JS, web!("novnc/core/crypto/aes.js")),
    ("/web/novnc/core/crypto/bigint.js", JS, web!("novnc/core/crypto/bigint.js")),
    ("/web/novnc/core/crypto/crypto.js", JS, web!("novnc/core/crypto/crypto.js")),
    ("/web/novnc/core/crypto/des.js", JS, web!("novnc/core/crypto/des.js")),
    ("/web/novnc/core/crypto/dh.js", JS, web!("novnc/core/crypto/dh.js")),
    ("/web/novnc/core/crypto/md5.js", JS, web!("novnc/core/crypto/md5.js")),
    ("/web/novnc/core/crypto/rsa.js", JS, web!("novnc/core/crypto/rsa.js")),
    ("/web/novnc/core/decoders/copyrect.js", JS, web!("novnc/core/decoders/copyrect.js")),
    ("/web/novnc/core/decoders/h264.js", JS, web!("novnc/core/decoders/h264.js")),
    ("/web/novnc/core/decoders/hextile.js", JS, web!("novnc/core/decoders/hextile.js")),
    ("/web/novnc/core/decoders/jpeg.js", JS, web!("novnc/core/decoders/jpeg.js")),
    ("/web/novnc/core/decoders/raw.js", JS, web!("novnc/core/decoders/raw.js")),
    ("/web/novnc/core/decoders/rre.js", JS, web!("novnc/core/decoders/rre.js")),
    ("/web/novnc/core/decoders/tight.js", JS, web!("novnc/core/decoders/tight.js")),
    ("/web/novnc/core/decoders/tightpng.js", JS, web!("novnc/core/decoders/tightpng.js")),
    ("/web/novnc/core/decoders/zlib.js", JS, web!("novnc/core/decoders/zlib.js")),
    ("/web/novnc/core/decoders/zrle.js", JS, web!("novnc/core/decoders/zrle.js")),
    ("/web/novnc/core/deflator.js", JS, web!("novnc/core/deflator.js")),
    ("/web/novnc/core/display.js", JS, web!("novnc/core/display.js")),
    ("/web/novnc/core/encodings.js", JS, web!("novnc/core/encodings.js")),
    ("/web/novnc/core/inflator.js", JS, web!("novnc/core/inflator.js")),
    ("/web/novnc/core/input/domkeytable.js", JS, web!("novnc/core/input/domkeytable.js")),
    ("/web/novnc/core/input/fixedkeys.js", JS, web!("novnc/core/input/fixedkeys.js")),
    ("/web/novnc/core/input/gesturehandler.js", JS, web!("novnc/core/input/gesturehandler.js")),
    ("/web/novnc/core/input/keyboard.js", JS, web!("novnc/core/input/keyboard.js")),
    ("/web/novnc/core/input/keysym.js", JS, web!("novnc/core/input/keysym.js")),
    ("/web/novnc/core/input/keysymdef.js", JS, web!("novnc/core/input/keysymdef.js")),
    ("/web/novnc/core/input/util.js", JS, web!("novnc/core/input/util.js")),
    ("/web/novnc/core/input/vkeys.js", JS, web!("novnc/core/input/vkeys.js")),
    ("/web/novnc/core/input/xtscancodes.js", JS, web!("novnc/core/input/xtscancodes.js")),
    ("/web/novnc/core/ra2.js", JS, web!("novnc/core/ra2.js")),
    ("/web/novnc/core/rfb.js", JS, web!("novnc/core/rfb.js")),
    ("/web/novnc/core/util/browser.js", JS, web!("novnc/core/util/browser.js")),
    ("/web/novnc/core/util/cursor.js", JS, web!("novnc/core/util/cursor.js")),
    ("/web/novnc/core/util/element.js", JS, web!("novnc/core/util/element.js")),
    ("/web/novnc/core/util/events.js", JS, web!("novnc/core/util/events.js")),
    ("/web/novnc/core/util/eventtarget.js", JS, web!("novnc/core/util/eventtarget.js")),
    ("/web/novnc/core/util/int.js", JS, web!("novnc/core/util/int.js")),
    ("/web/novnc/core/util/logging.js", JS, web!("novnc/core/util/logging.js")),
    ("/web/novnc/core/util/strings.js", JS, web!("novnc/core/util/strings.js")),
    ("/web/novnc/core/websock.js", JS, web!("novnc/core/websock.js")),
    ("/web/novnc/vendor/pako/LICENSE", TEXT, web!("novnc/vendor/pako/LICENSE")),
    ("/web/novnc/vendor/pako/lib/utils/common.js", JS, web!("novnc/vendor/pako/lib/utils/common.js")),
    ("/web/novnc/vendor/pako/lib/zlib/adler32.js", JS, web!("novnc/vendor/pako/lib/zlib/adler32.js")),
    ("/web/novnc/vendor/pako/lib/zlib/crc32.js", JS, web!("novnc/vendor/pako/lib/zlib/crc32.js")),
    ("/web/novnc/vendor/pako/lib/zlib/deflate.js", JS, web!("novnc/vendor/pako/lib/zlib/deflate.js")),
    ("/web/novnc/vendor/pako/lib/zlib/inffast.js", JS, web!("novnc/vendor/pako/lib/zlib/inffast.js")),
    ("/web/novnc/vendor/pako/lib/zlib/inflate.js", JS, web!("novnc/vendor/pako/lib/zlib/inflate.js")),
    ("/web/novnc/vendor/pako/lib/zlib/inftrees.js", JS, web!("novnc/vendor/pako/lib/zlib/inftrees.js")),
    ("/web/novnc/vendor/pako/lib/zlib/messages.js", JS, web!("novnc/vendor/pako/lib/zlib/messages.js")),
    ("/web/novnc/vendor/pako/lib/zlib/trees.js", JS, web!("novnc/vendor/pako/lib/zlib/trees.js")),
    ("/web/novnc/vendor/pako/lib/zlib/zstream.js", JS, web!("novnc/vendor/pako/lib/zlib/zstream.js")),
    ("/web/uplot/uPlot.iife.min.js", JS, web!("uplot/uPlot.iife.min.js")),
    ("/web/uplot/uPlot.min.css", CSS, web!("uplot/uPlot.min.css")),
    ("/web/uplot/LICENSE", TEXT, web!("uplot/LICENSE")),
];
