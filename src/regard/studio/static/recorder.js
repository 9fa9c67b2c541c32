// Records the microphone as a WAV file with one channel, if the browser supports recording.

import { el } from "/page/dom.js";
import { say } from "./words.js";

const RATE = 16000;
const LONGEST = 60_000; // longest recording in milliseconds

// Returns a button that starts a recording, and ends it when pressed again; null if the browser cannot record.
export function recorder(done, failed) {
  if (!navigator.mediaDevices?.getUserMedia || typeof MediaRecorder === "undefined") return null;
  let recording = null;
  const button = el("button", { type: "button", class: "record", "aria-pressed": "false", text: say("recordSound"), onclick: () => (recording ? recording.stop() : start()) });
  const mark = (on) => {
    button.setAttribute("aria-pressed", String(on));
    button.textContent = say(on ? "stopRecording" : "recordSound");
  };

  async function start() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      return failed(say("noMicrophone"));
    }
    const parts = [];
    recording = new MediaRecorder(stream);
    const limit = setTimeout(() => recording?.stop(), LONGEST);
    recording.ondataavailable = ({ data }) => parts.push(data);
    recording.onstop = async () => {
      clearTimeout(limit);
      recording = null;
      mark(false);
      stream.getTracks().forEach((track) => track.stop());
      try {
        done(await wav(new Blob(parts)));
      } catch {
        failed(say("noMicrophone"));
      }
    };
    recording.start();
    mark(true);
  }

  return button;
}

async function wav(blob) {
  const context = new AudioContext();
  const decoded = await context.decodeAudioData(await blob.arrayBuffer());
  await context.close();
  const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(decoded.duration * RATE)), RATE);
  const source = offline.createBufferSource();
  source.buffer = decoded;
  source.connect(offline.destination);
  source.start();
  return encoded((await offline.startRendering()).getChannelData(0), RATE);
}

// Encodes samples as 16-bit PCM with the header of a WAV file.
export function encoded(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => [...letters].forEach((letter, n) => view.setUint8(at + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, n) => view.setInt16(44 + 2 * n, Math.round(Math.max(-1, Math.min(1, sample)) * 32767), true));
  return new Blob([view], { type: "audio/wav" });
}
