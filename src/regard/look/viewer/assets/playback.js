// Plays the sound of a trace, and reports its position.

import { el } from "./dom.js";

export class Playback {
  // `moved()` is called while the sound plays, and once when it ends.
  constructor(moved) {
    this.moved = moved;
    this.element = el("div", { class: "save playback", hidden: true });
    this.source = null;
    this.sound = null;
  }

  // Sets the sound to play; null if the labels of the map have no sound.
  show(sound, say) {
    if (sound !== this.sound) this.stop();
    Object.assign(this, { sound, say });
    this.element.hidden = !sound;
    this.button = el("button", { type: "button", "data-here": "play", onclick: () => (this.source ? this.stop() : this.play()) });
    this.element.replaceChildren(this.button);
    this.tell();
  }

  // The position of the sound in seconds from its beginning; null while nothing plays.
  get time() {
    return this.source ? Math.max(0, this.context.currentTime - this.began) : null;
  }

  async play() {
    this.context ??= new AudioContext();
    const bytes = Uint8Array.from(atob(this.sound), (letter) => letter.charCodeAt(0));
    const buffer = await this.context.decodeAudioData(bytes.buffer);
    await this.context.resume();
    this.source = new AudioBufferSourceNode(this.context, { buffer });
    this.source.connect(this.context.destination);
    this.source.onended = () => this.stop();
    this.began = this.context.currentTime;
    this.source.start();
    this.tell();
    this.follow();
  }

  follow() {
    if (!this.source) return;
    this.moved();
    requestAnimationFrame(() => this.follow());
  }

  stop() {
    if (!this.source) return;
    const { source } = this;
    this.source = null;
    source.onended = null;
    source.stop();
    this.tell();
    this.moved();
  }

  tell() {
    if (this.button) this.button.textContent = this.say(this.source ? "stopSound" : "playSound");
  }
}
